"""Names become versions: registered names, clients' names, former ones, merged ones."""

from __future__ import annotations

import asyncio
import shutil
import tracemalloc
from pathlib import Path

import pytest

from millrace_router.adapters.memory import Recent, new_grants
from millrace_router.adapters.names import MAX_OLDER, Registry
from millrace_router.adapters.resolver import MAX_REFUSALS, REFUSAL_SECONDS, ClientRules, Resolver
from millrace_router.errors import (
    AdapterForbidden,
    AdapterInvalid,
    AdapterNotFound,
    AdapterRemoved,
    AdapterUnavailable,
    ValidationError,
)
from millrace_router.request.adapter import (
    AdapterReference,
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
    MergeStrategy,
)
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.adapters.fake_fetcher import (
    FakeFetcher,
    Repository,
    registered,
    resolver_of,
    version,
    write_adapter,
)
from millrace_testing.clock import Clock

OPEN = ClientRules(patterns=("hub:org/*",))
PRIVATE = Repository(tokens=frozenset({"good", "other"}))


def timed(fetcher: FakeFetcher, clock: Clock, rules: ClientRules = OPEN) -> Resolver:
    return Resolver(
        Registry(),
        fetcher,
        Metrics(max_input_tokens=8, max_total_tokens=16),
        rules=rules,
        grants=new_grants(clock),
        refusals=Recent(MAX_REFUSALS, seconds=REFUSAL_SECONDS, clock=clock),
    )


async def resolve(
    resolver: Resolver,
    name: str,
    *,
    source: AdapterSource | None = None,
    token: str | None = None,
) -> AdapterVersion:
    return await resolver.resolve(AdapterReference(name=name, source=source, token=token), "me")


async def test_a_registered_folder_is_fetched_once_and_anew_when_its_files_change(
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path, "one")
    fetcher = FakeFetcher()
    resolver = resolver_of(fetcher, registered("mine", tmp_path))
    first = await resolve(resolver, "mine")
    assert first == version("mine", "one")
    assert await resolve(resolver, "mine") == first
    assert fetcher.fetched == [("mine", None)]
    write_adapter(tmp_path, "two")
    assert (await resolve(resolver, "mine")).digest == version("", "two").digest
    shutil.rmtree(tmp_path)
    assert (await resolve(resolver, "mine")).digest == version("", "two").digest
    assert len(fetcher.fetched) == 2


async def test_former_versions_have_names_while_their_copies_are_there(tmp_path: Path) -> None:
    fetcher = FakeFetcher()
    resolver = resolver_of(fetcher, registered("mine", tmp_path))
    digests = []
    for number in range(MAX_OLDER + 2):
        write_adapter(tmp_path, str(number))
        digests.append((await resolve(resolver, "mine")).digest)
    *_, former, current = digests
    assert (await resolve(resolver, f"mine@sha256:{current}")).digest == current
    assert (await resolve(resolver, f"mine@sha256:{former}")).digest == former
    fetcher.missing.add(former)
    for digest in (former, digests[0], "0" * 64):
        with pytest.raises(AdapterNotFound):
            await resolve(resolver, f"mine@sha256:{digest}")


async def test_a_version_that_left_the_cache_is_fetched_again() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository()})
    resolver = resolver_of(fetcher, registered("mine", "org/a"))
    first = await resolve(resolver, "mine")
    fetcher.missing.add(first.digest)
    await resolve(resolver, "mine")
    assert len(fetcher.fetched) == 2


async def test_first_uses_at_the_same_time_fetch_once_and_survive_the_one_that_leaves() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository()}, gate=asyncio.Event())
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    resolver = resolver_of(fetcher, registered("mine", "org/a"), metrics=metrics)
    waiting = [asyncio.create_task(resolve(resolver, "mine")) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    assert fetcher.gate is not None
    fetcher.gate.set()
    versions = await asyncio.gather(*waiting[1:])
    assert waiting[0].cancelled()
    assert len({one.digest for one in versions}) == len(fetcher.fetched) == 1
    assert metrics.adapter_fetches.labels(outcome="fetched").value == 1
    assert metrics.adapter_fetched_bytes.value == 100


async def test_first_uses_of_an_id_on_the_hub_ask_and_fetch_once() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository()}, gate=asyncio.Event())
    resolver = resolver_of(fetcher, rules=OPEN)
    waiting = [asyncio.create_task(resolve(resolver, "org/a")) for _ in range(5)]
    while not fetcher.asked:
        await asyncio.sleep(0)
    assert fetcher.gate is not None
    fetcher.gate.set()
    await asyncio.gather(*waiting)
    assert (len(fetcher.asked), len(fetcher.fetched)) == (1, 1)


async def test_unregistered_names_are_unknown_by_default(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", "one")
    fetcher = FakeFetcher(hub={"org/a": Repository()})
    resolver = resolver_of(fetcher)
    for name in ("a", "org/a", "org/a@main", str(tmp_path / "a"), ""):
        for source in (None, *AdapterSource):
            with pytest.raises(AdapterNotFound):
                await resolve(resolver, name, source=source)
    assert fetcher.fetched == []


async def test_the_operator_may_open_ids_on_the_hub() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository(), "orgs/a": Repository()})
    resolver = resolver_of(fetcher, rules=OPEN)
    assert (await resolve(resolver, "org/a")).digest == version("", "weights None").digest
    assert (await resolve(resolver, "org/a@v1")).digest == version("", "weights v1").digest
    for name in ("orgs/a", "org/a/b", "org", "org/..", "org/a@../b", "x/org/a"):
        with pytest.raises(AdapterNotFound):
            await resolve(resolver, name)
    assert resolver.is_adapter("org/new")
    assert not resolver.is_adapter("orgs/new")


async def test_clients_may_name_only_folders_below_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_adapter(root / "team" / "a", "one")
    write_adapter(tmp_path / "outside", "two")
    fetcher = FakeFetcher()
    resolver = resolver_of(fetcher, rules=ClientRules(root=root))
    local = AdapterSource.LOCAL
    assert (await resolve(resolver, "team/a", source=local)).digest == version("", "one").digest
    write_adapter(root / "team" / "a", "three")
    assert (await resolve(resolver, "team/a", source=local)).digest == version("", "three").digest
    names = ("../outside", "team/../../outside", str(tmp_path / "outside"), "team/none", ".", "~")
    for name in names:
        with pytest.raises(AdapterNotFound):
            await resolve(resolver, name, source=local)
    with pytest.raises(AdapterNotFound):
        await resolve(resolver, "team/a")
    assert len(fetcher.fetched) == 2


def test_a_folder_below_the_root_is_an_adapter_where_ids_are_folders(tmp_path: Path) -> None:
    write_adapter(tmp_path / "mine", "one")
    rules = ClientRules(source=AdapterSource.LOCAL, root=tmp_path)
    resolver = resolver_of(FakeFetcher(), rules=rules)
    assert resolver.is_adapter("mine")
    assert not resolver.is_adapter("gpt-4o")


async def test_the_source_is_part_of_a_name(tmp_path: Path) -> None:
    write_adapter(tmp_path, "one")
    resolver = resolver_of(FakeFetcher(), registered("mine", tmp_path))
    await resolve(resolver, "mine", source=AdapterSource.LOCAL)
    with pytest.raises(AdapterNotFound):
        await resolve(resolver, "mine", source=AdapterSource.HUB)


@pytest.mark.parametrize("name", ["a\nb", "a\x00", "\x1b[31m", "a\u2028b", "\ud800", "x" * 257])
async def test_names_that_logs_cannot_show_are_refused(name: str) -> None:
    with pytest.raises(ValidationError):
        await resolve(resolver_of(FakeFetcher(), rules=OPEN), name)


async def test_a_private_name_is_not_confirmed_without_a_token() -> None:
    resolver = resolver_of(FakeFetcher(hub={"org/a": PRIVATE}), rules=OPEN)
    with pytest.raises(AdapterNotFound):
        await resolve(resolver, "org/a")
    with pytest.raises(AdapterForbidden):
        await resolve(resolver, "org/a", token="bad")
    await resolve(resolver, "org/a", token="good")
    # The weights are there now, and the others still may not use them.
    with pytest.raises(AdapterNotFound):
        await resolve(resolver, "org/a")
    with pytest.raises(AdapterForbidden):
        await resolve(resolver, "org/a", token="bad")


async def test_a_revoked_token_is_refused_after_a_minute() -> None:
    fetcher, clock = FakeFetcher(hub={"org/a": PRIVATE}), Clock()
    resolver = timed(fetcher, clock)
    await resolve(resolver, "org/a", token="good")
    fetcher.hub["org/a"] = Repository(tokens=frozenset({"other"}))
    clock.now = 59.0
    await resolve(resolver, "org/a", token="good")
    assert len(fetcher.asked) == 1
    clock.now = 60.0
    with pytest.raises(AdapterForbidden):
        await resolve(resolver, "org/a", token="good")
    assert resolver.named_by("good") == []


async def test_a_hub_that_fails_opens_nothing() -> None:
    fetcher, clock = FakeFetcher(hub={"org/a": PRIVATE}), Clock()
    resolver = timed(fetcher, clock)
    await resolve(resolver, "org/a", token="good")
    clock.now, fetcher.error = 61.0, AdapterUnavailable("org/a", "down")
    with pytest.raises(AdapterUnavailable):
        await resolve(resolver, "org/a", token="good")


async def test_each_token_is_checked_and_the_weights_are_fetched_once() -> None:
    fetcher, clock = FakeFetcher(hub={"org/a": PRIVATE}), Clock()
    resolver = timed(fetcher, clock)
    for token in ("good", "other", "good", "other"):
        await resolve(resolver, "org/a", token=token)
    clock.now = 61.0
    await resolve(resolver, "org/a", token="good")
    assert [token for _, token in fetcher.asked] == ["good", "other", "good"]
    assert len(fetcher.fetched) == 1


async def test_a_moved_branch_is_seen_within_a_minute() -> None:
    fetcher, clock = FakeFetcher(hub={"org/a": Repository("old")}), Clock()
    resolver = timed(fetcher, clock)
    first = await resolve(resolver, "org/a")
    fetcher.hub["org/a"] = Repository("new")
    clock.now = 61.0
    assert (await resolve(resolver, "org/a")).digest != first.digest


async def test_failures_are_remembered_for_a_while_but_not_outages() -> None:
    fetcher, clock = FakeFetcher(error=AdapterInvalid("org/a", "DoRA")), Clock()
    resolver = timed(fetcher, clock)
    for _ in range(3):
        with pytest.raises(AdapterInvalid, match="DoRA"):
            await resolve(resolver, "org/a")
    assert len(fetcher.asked) == 1
    clock.now, fetcher.error = REFUSAL_SECONDS, AdapterUnavailable("org/a", "down")
    for _ in range(3):
        with pytest.raises(AdapterUnavailable):
            await resolve(resolver, "org/a")
    assert len(fetcher.asked) == 4


async def test_a_corrected_folder_is_tried_at_once(tmp_path: Path) -> None:
    write_adapter(tmp_path, "one")
    fetcher = FakeFetcher(error=AdapterInvalid("mine", "NaN"))
    resolver = resolver_of(fetcher, registered("mine", tmp_path))
    for _ in range(2):
        with pytest.raises(AdapterInvalid):
            await resolve(resolver, "mine")
    assert len(fetcher.fetched) == 1
    fetcher.error = None
    write_adapter(tmp_path, "two")
    await resolve(resolver, "mine")


async def test_a_name_that_was_one_of_an_adapter_stays_one() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository()})
    resolver = resolver_of(fetcher, registered("mine", "org/a"))
    await resolve(resolver, "mine")
    assert resolver.registry.remove("mine")
    assert not resolver.registry.remove("mine")
    assert resolver.is_adapter("mine")
    with pytest.raises(AdapterRemoved, match="unloaded"):
        await resolve(resolver, "mine")
    resolver.registry.add(registered("mine", "org/a"))
    await resolve(resolver, "mine")


async def test_the_operators_adapters_use_the_servers_token_and_clients_never() -> None:
    private = Repository(tokens=frozenset({"server"}))
    fetcher = FakeFetcher(hub={"org/a": private})
    resolver = resolver_of(fetcher, registered("mine", "org/a"), rules=OPEN)
    await resolve(resolver, "mine")
    with pytest.raises(AdapterNotFound):
        await resolve(resolver, "org/a")


async def test_several_adapters_become_one_version_once() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository("a"), "org/b": Repository("b")})
    resolver = resolver_of(fetcher, registered("a", "org/a"), registered("b", "org/b"))
    recipe = MergeRecipe(ids=("a", "b"), weights=(0.5, 0.5), strategy=MergeStrategy.CAT)
    reference = AdapterReference(merged=recipe)
    first = await resolver.resolve(reference, "me")
    assert await resolver.resolve(reference, "me") == first
    assert len(fetcher.merged) == 1
    fetcher.missing.add(first.digest)
    await resolver.resolve(reference, "me")
    assert len(fetcher.merged) == 2
    unknown = MergeRecipe(ids=("a", "c"), weights=(0.5, 0.5))
    with pytest.raises(AdapterNotFound, match="'c'"):
        await resolver.resolve(AdapterReference(merged=unknown), "me")


async def test_made_up_names_leave_nothing_behind() -> None:
    fetcher = FakeFetcher(hub={})
    resolver = resolver_of(fetcher, rules=OPEN)

    async def ask(first: int, count: int) -> None:
        for number in range(first, first + count):
            for name in (f"name {number}", f"org/a{number}"):
                with pytest.raises(AdapterNotFound):
                    await resolve(resolver, name)
        fetcher.asked.clear()

    await ask(0, MAX_REFUSALS)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        await ask(10**6, 2 * MAX_REFUSALS)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 1_000_000


async def test_many_registered_names_are_small() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository()})
    tracemalloc.start()
    try:
        resolver = resolver_of(fetcher, *(registered(f"n{i}", "org/a") for i in range(10_000)))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(resolver.registry) == 10_000
    assert used < 10_000_000


async def test_versions_of_one_shape_share_its_description() -> None:
    fetcher = FakeFetcher(hub={"org/a": Repository("a"), "org/b": Repository("b")})
    resolver = resolver_of(fetcher, registered("a", "org/a"), registered("b", "org/b"))
    one, two = await resolve(resolver, "a"), await resolve(resolver, "b")
    assert one.digest != two.digest
    assert one.num_slices is two.num_slices
