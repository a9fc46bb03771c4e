"""The fetcher over programs in place of the fetching process: two at once, time, memory, kills, and its memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from millrace_router.adapters.cache import KEPT_SECONDS, AdapterCache
from millrace_router.adapters.child import COMMAND, run_child
from millrace_router.adapters.fetcher import (
    LAST_VERSIONS,
    MAX_OF_CLIENTS,
    MAX_PER_CALLER,
    Fetcher,
    FetchLimits,
    LastVersions,
)
from millrace_router.adapters.names import NamedSource
from millrace_router.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterTooLarge,
    AdapterUnavailable,
)
from millrace_router.request.adapter import (
    PAGE_BYTES,
    AdapterModule,
    AdapterSource,
    AdapterVersion,
    MergeRecipe,
    MergeStrategy,
)
from millrace_testing.adapters.fake_fetcher import version
from millrace_testing.adapters.peft_files import modules_of, save_adapter, tiny_llama
from millrace_testing.clock import Clock

LLAMA = modules_of(tiny_llama())
LIMITS = FetchLimits(max_bytes=1 << 24, timeout_seconds=60)
PROGRAM = """
import json, os, sys, time
request = json.load(sys.stdin)
folder, id_ = {folder!r}, request["source"]["id"]
open(os.path.join(folder, "started-" + id_), "w").write(str(os.getpid()))
while not os.path.exists(os.path.join(folder, "go-" + id_)):
    time.sleep(0.005)
print(open(os.path.join(folder, "go-" + id_)).read())
"""
"""Writes its id to a file `started-<id>`, and answers with the file `go-<id>` when it is there."""


def answer_of(digest: str, num_bytes: int = 10, **other: Any) -> str:
    return json.dumps(
        {
            "digest": digest * 64,
            "num_bytes": num_bytes,
            "modules": [["m", 17, True]],
            "note": None,
            "source_digest": "d",
        }
        | other
    )


class Play:
    """A fetcher over programs that wait for their cue."""

    def __init__(
        self, folder: Path, *, max_bytes: int, needed: Collection[str], limits: FetchLimits
    ) -> None:
        self.folder = folder
        self.clock = Clock()
        self.cache = AdapterCache(folder / "cache", max_bytes=max_bytes, clock=self.clock)
        self.cache.open()
        program = PROGRAM.format(folder=str(folder))
        self.fetcher = Fetcher(
            self.cache,
            modules=[AdapterModule(name="m", inputs=8, outputs=8, bytes_per_slice=1)],
            num_pages=1,
            limits=limits,
            needed=lambda: needed,
            clock=self.clock,
            command=(sys.executable, "-S", "-c", program),
        )

    def fetch(
        self, id_: str, *, caller: str = "", by_operator: bool = False
    ) -> asyncio.Task[AdapterVersion]:
        source = NamedSource(kind=AdapterSource.LOCAL, location=id_, by_operator=by_operator)
        fetch = self.fetcher.fetch(source, name=f"name of {id_}", token=None, caller=caller)
        return asyncio.create_task(fetch)

    def go(self, id_: str, answer: str) -> None:
        (self.folder / "new").write_text(answer)
        (self.folder / "new").rename(self.folder / f"go-{id_}")

    async def started(self, id_: str) -> int:
        """Wait for the program of a fetch, and return its process id."""
        while not (path := self.folder / f"started-{id_}").exists() or not path.read_text():
            await asyncio.sleep(0.001)
        return int(path.read_text())

    def running(self) -> set[str]:
        return {path.name.removeprefix("started-") for path in self.folder.glob("started-*")}


@asynccontextmanager
async def playing(
    folder: Path,
    *,
    max_bytes: int = 1000,
    needed: Collection[str] = (),
    limits: FetchLimits = LIMITS,
) -> AsyncIterator[Play]:
    play = Play(folder, max_bytes=max_bytes, needed=needed, limits=limits)
    try:
        yield play
    finally:
        await play.fetcher.close()


async def test_versions_count_slices_and_biases(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        play.go("a", answer_of("a", note="a note"))
        with capture_logs() as logs:
            version = await play.fetch("a")
        assert version == AdapterVersion(
            digest="a" * 64, name="name of a", num_slices=(("m", 3),), num_bytes=10
        )
        assert (logs[0]["event"], logs[0]["adapter"]) == ("a note", "name of a")


async def test_two_fetches_run_at_once(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        tasks = {id_: play.fetch(id_) for id_ in "abc"}
        await play.started("a")
        await play.started("b")
        assert play.running() == {"a", "b"}
        play.go("b", answer_of("b"))
        await tasks["b"]
        await play.started("c")
        for id_ in "ac":
            play.go(id_, answer_of(id_))
        assert [(await tasks[id_]).digest[0] for id_ in "ac"] == ["a", "c"]


async def test_abandoned_fetches_are_killed(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        task = play.fetch("a")
        process = await play.started("a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        play.go("b", answer_of("b"))
        assert (await play.fetch("b")).digest


async def test_no_caller_can_fill_the_fetch_queue(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        many = [play.fetch(str(number), caller="greedy") for number in range(MAX_PER_CALLER)]
        await play.started("0")
        with pytest.raises(AdapterUnavailable, match="too many adapters"):
            await asyncio.wait_for(play.fetch("x", caller="greedy"), 30.0)
        others = [play.fetch(f"y{n}") for n in range(MAX_OF_CLIENTS - len(many))]
        await asyncio.sleep(0)
        with pytest.raises(AdapterUnavailable, match="too many adapters"):
            await asyncio.wait_for(play.fetch("z", caller="late"), 30.0)
        operators = play.fetch("o", by_operator=True)
        await asyncio.sleep(0)
        assert not any(task.done() for task in (*many, *others, operators))


async def test_callers_that_wait_to_fetch_alternate(tmp_path: Path) -> None:
    """One with eight slow fetches holds one of two turns, and delays another by no more than one fetch."""
    async with playing(tmp_path) as play:
        many = [play.fetch(f"greedy{n}", caller="greedy") for n in range(MAX_PER_CALLER)]
        await play.started("greedy0")
        other = play.fetch("other", caller="other")
        async with asyncio.timeout(30.0):
            await play.started("other")
        assert play.running() == {"greedy0", "other"}
        late = [play.fetch(f"late{n}", caller="late") for n in range(2)]
        play.go("other", answer_of("a"))
        await other
        await play.started("late0")
        play.go("greedy0", answer_of("b"))
        await many[0]
        await play.started("greedy1")
        assert play.running() == {"greedy0", "other", "late0", "greedy1"}
        many[2].cancel()
        play.go("late0", answer_of("c"))
        play.go("greedy1", answer_of("d"))
        await asyncio.gather(late[0], many[1])
        await play.started("late1")
        await play.started("greedy3")
        assert "greedy2" not in play.running()


async def test_a_fetch_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    async with playing(tmp_path, limits=FetchLimits(timeout_seconds=0.5)) as play:
        with pytest.raises(AdapterUnavailable, match="took too long"):
            await play.fetch("a")
        if "a" in play.running():
            with pytest.raises(ProcessLookupError):
                os.kill(await play.started("a"), 0)


async def test_a_fetch_that_is_killed_may_be_repeated(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        task = play.fetch("a")
        os.kill(await play.started("a"), signal.SIGKILL)
        with pytest.raises(AdapterUnavailable, match="was killed") as refusal:
            await task
        assert refusal.value.retry_after_seconds == 1
        play.clock.now = 1.0
        play.go("a", answer_of("a"))
        assert (await play.fetch("a")).digest == "a" * 64


async def test_a_process_that_is_killed_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a")
    program = (
        "import os; os.fsync = lambda _: os.kill(os.getpid(), 9);"
        "from millrace_router.adapters.fetching.__main__ import main; main()"
    )
    fetcher = real(tmp_path, (sys.executable, "-P", "-c", program))
    other = tmp_path / "cache" / ".partial-1-of-another-process"
    other.mkdir(parents=True)
    with pytest.raises(AdapterUnavailable, match="was killed"):
        await fetch(fetcher, local(tmp_path / "a"))
    assert list((tmp_path / "cache").iterdir()) == [other]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "did not answer"),
        ("nonsense", "did not answer"),
        ('{"error": "broken", "reason": "KeyError in line 3"}', "failed: KeyError in line 3"),
    ],
)
async def test_a_process_without_an_answer_is_unavailable(
    answer: str, message: str, tmp_path: Path
) -> None:
    async with playing(tmp_path) as play:
        play.go("a", answer)
        with pytest.raises(AdapterUnavailable, match=message):
            await play.fetch("a")


async def test_a_program_that_does_not_start_is_unavailable(tmp_path: Path) -> None:
    fetcher = real(tmp_path, ("/nothing",))
    with pytest.raises(AdapterUnavailable, match="did not start"):
        await fetch(fetcher, local("a"))


async def test_each_failure_doubles_the_wait_up_to_a_minute(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        play.go("a", '{"error": "unavailable", "reason": "no"}')
        seconds = []
        for _ in range(8):
            with pytest.raises(AdapterUnavailable) as refusal:
                await play.fetch("a")
            after = refusal.value.retry_after_seconds
            assert after is not None
            seconds.append(after)
            play.clock.now += after
        assert seconds == [1, 2, 4, 8, 16, 32, 60, 60]
        play.clock.now += 1000
        with pytest.raises(AdapterUnavailable) as refusal:
            await play.fetch("a")
        assert refusal.value.retry_after_seconds == 1
        # Another adapter goes on.
        play.go("b", answer_of("b"))
        assert (await play.fetch("b")).digest


async def test_broken_adapters_are_remembered_by_their_files(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        refusal = {"error": "invalid", "reason": "because", "source_digest": "d1"}
        play.go("a", json.dumps(refusal))
        with pytest.raises(AdapterInvalid, match="because"):
            await play.fetch("a")
        play.go("a", '{"is_known": true}')
        with pytest.raises(AdapterInvalid, match="because"):
            await play.fetch("a")
        (tmp_path / "cache" / ("a" * 64)).mkdir()
        (tmp_path / "cache" / ("a" * 64) / "adapter.safetensors").touch()
        play.go("a", answer_of("a", source_digest="d2"))
        version = await play.fetch("a")
        play.go("a", '{"is_known": true}')
        assert await play.fetch("a") == version
        play.go("a", '{"error": "not_found", "reason": ""}')
        with pytest.raises(AdapterNotFound, match="'name of a' does not exist"):
            await play.fetch("a")


async def test_the_cache_evicts_only_versions_that_are_not_in_use(tmp_path: Path) -> None:
    async with playing(tmp_path, max_bytes=25, needed={"a" * 64}) as play:
        for id_ in "ab":
            (tmp_path / "cache" / (id_ * 64)).mkdir()
            play.go(id_, answer_of(id_))
            await play.fetch(id_)
        play.clock.now = 10.0
        play.go("c", answer_of("c"))
        await play.fetch("c")
        assert {path.name[0] for path in (tmp_path / "cache").iterdir()} == {"a"}
        assert ("a" * 64 in play.cache, "b" * 64 in play.cache) == (True, False)
        play.go("d", answer_of("d", 16))
        with pytest.raises(AdapterUnavailable, match="full of adapters in use"):
            await play.fetch("d")
        play.go("e", answer_of("e", 26))
        with pytest.raises(AdapterTooLarge) as refusal:
            await play.fetch("e")
        assert (refusal.value.num_bytes, refusal.value.limit) == (26, 25)


def real(
    folder: Path, command: tuple[str, ...] = COMMAND, *, limits: FetchLimits = LIMITS
) -> Fetcher:
    cache = AdapterCache(folder / "cache", max_bytes=1 << 30, clock=time.monotonic)
    cache.open()
    return Fetcher(cache, modules=LLAMA, num_pages=1000, limits=limits, needed=set, command=command)


def local(path: Path | str, root: Path | None = None) -> NamedSource:
    return NamedSource(kind=AdapterSource.LOCAL, location=str(path), root=root)


async def fetch(
    fetcher: Fetcher, source: NamedSource, *, token: str | None = None
) -> AdapterVersion:
    return await fetcher.fetch(source, name="mine", token=token, caller="")


async def test_the_real_process_fetches_and_merges(tmp_path: Path) -> None:
    save_adapter(tmp_path / "root" / "a")
    save_adapter(tmp_path / "root" / "b", seed=1, target_modules=["q_proj"])
    fetcher = real(tmp_path)
    versions = [await fetch(fetcher, local(id_, tmp_path / "root")) for id_ in "ab"]
    recipe = MergeRecipe(ids=("a", "b"), weights=(0.5, 2.0), strategy=MergeStrategy.CAT)
    merged = await fetcher.merge(recipe, versions)
    assert (tmp_path / "cache" / merged.digest / "adapter.safetensors").is_file()
    assert (merged.name, merged.num_bytes > versions[0].num_bytes) == ("a,b", True)
    with pytest.raises(AdapterNotFound):
        await fetch(fetcher, local("../x", tmp_path / "root"))


async def test_a_pattern_that_never_ends_is_killed(tmp_path: Path) -> None:
    save_adapter(tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    bomb = {"rank_pattern": {r"([a-z_.0-9]+)+!": 8}}
    path.write_text(json.dumps(json.loads(path.read_text()) | bomb))
    limits = FetchLimits(timeout_seconds=3.0)
    with pytest.raises(AdapterUnavailable, match="took too long"):
        await fetch(real(tmp_path, limits=limits), local(tmp_path / "a"))


async def test_memory_has_a_limit(tmp_path: Path) -> None:
    """A program that begins as the real one does, and then asks for more memory than it may have."""
    program = (
        "import millrace_router.adapters.fetching.__main__ as main\n"
        "main.answer = lambda request: bytearray(1 << 32)\n"
        "main.main()\n"
    )
    fetcher = real(tmp_path, (sys.executable, "-c", program))
    with pytest.raises(AdapterUnavailable, match="needs more memory"):
        await fetch(fetcher, local(tmp_path))


async def test_a_defect_is_reported_without_values(tmp_path: Path) -> None:
    program = (
        "import millrace_router.adapters.fetching.__main__ as main\n"
        "def answer(request):\n"
        "    raise ValueError(request['source']['token'])\n"
        "main.answer = answer\n"
        "main.main()\n"
    )
    hub = NamedSource(kind=AdapterSource.HUB, location="org/a")
    fetcher = real(tmp_path, (sys.executable, "-c", program))
    with pytest.raises(AdapterUnavailable, match="ValueError in line 3 of answer") as refusal:
        await fetch(fetcher, hub, token="hf_secret")
    assert "hf_secret" not in str(refusal.value)


ECHO = """
import json, sys
source = json.load(sys.stdin)["source"]
token = source.pop("token")
print(json.dumps({"error": "invalid", "reason": f"{token} {source['id']} {source['revision']} {source['root']}"}))
"""
"""Answers with the source that it is asked for."""


@pytest.mark.parametrize(
    ("by_operator", "token", "used"),
    [(True, None, "server"), (False, None, None), (False, "client", "client")],
)
async def test_the_servers_token_counts_only_for_the_operators_adapters(
    tmp_path: Path, *, by_operator: bool, token: str | None, used: str | None
) -> None:
    fetcher = Fetcher(
        AdapterCache(tmp_path, max_bytes=0, clock=lambda: 0.0),
        modules=LLAMA,
        num_pages=1,
        needed=set,
        server_token=lambda: "server",
        command=(sys.executable, "-S", "-c", ECHO),
    )
    source = NamedSource(
        kind=AdapterSource.HUB, location="org/a", revision="v1", by_operator=by_operator
    )
    for ask in (fetcher.fetch, fetcher.commit_of):
        with pytest.raises(AdapterInvalid) as refusal:
            await ask(source, name="a", token=token, caller="me")
        assert refusal.value.reason == f"{used} org/a v1 None"


async def test_a_version_larger_than_the_memory_for_adapters_is_refused(tmp_path: Path) -> None:
    async with playing(tmp_path) as play:
        play.go("a", answer_of("a", modules=[["m", 16 * PAGE_BYTES, False]]))
        await play.fetch("a")
        play.go("b", answer_of("b", modules=[["m", 16 * PAGE_BYTES, True]]))
        with pytest.raises(AdapterTooLarge) as refusal:
            await play.fetch("b")
        assert (refusal.value.num_bytes, refusal.value.limit) == (2 * PAGE_BYTES, PAGE_BYTES)


SOURCE = (AdapterSource.HUB, "org/a", "main", None)
SERVER = ("https://hub", (("q_proj", 8, 8),), 64)


def last(cache: Path, server: object = SERVER, source: object = SOURCE) -> AdapterVersion | None:
    return LastVersions(cache, server=server).get(source, "b")


def test_a_version_outlasts_the_process(tmp_path: Path) -> None:
    assert last(tmp_path) is None
    kept = LastVersions(tmp_path, server=SERVER)
    for weights in ("old", "new"):
        kept.keep(SOURCE, version("a", weights))
        assert last(tmp_path) == replace(version("a", weights), name="b")
    assert len(list((tmp_path / LAST_VERSIONS).iterdir())) == 1


def test_other_sources_and_other_servers_have_others(tmp_path: Path) -> None:
    LastVersions(tmp_path, server=SERVER).keep(SOURCE, version("a", "x"))
    for other in (("https://else", *SERVER[1:]), (*SERVER[:2], 32), (SERVER[0], (), 64)):
        assert last(tmp_path, server=other) is None
    assert last(tmp_path, source=(AdapterSource.HUB, "org/a", "v2", None)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"digest": 1}', "{digest}"])
def test_a_damaged_record_is_no_version(tmp_path: Path, text: str) -> None:
    LastVersions(tmp_path, server=SERVER).keep(SOURCE, version("a", "x"))
    (path,) = (tmp_path / LAST_VERSIONS).iterdir()
    digest = version("a", "x").digest
    path.write_text(path.read_text().replace(digest, "../x") if text == "{digest}" else text)
    assert last(tmp_path) is None


ROUNDS = 40
CLOSES_STDIN = ("sh", "-c", "exec <&-; echo '{}'")


def test_a_large_request_arrives_whole() -> None:
    request = {"words": ["x" * 100] * 5000}
    assert asyncio.run(run_child(request, timeout_seconds=60, command=("cat",))) == request


def test_a_process_that_closes_its_stdin_early_can_answer() -> None:
    async def answers() -> list[dict[str, Any]]:
        request = {"words": "x" * 5000}
        return [
            await run_child(request, timeout_seconds=60, command=CLOSES_STDIN)
            for _ in range(ROUNDS)
        ]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(answers()) == [{}] * ROUNDS


def digest(number: int) -> str:
    return f"{number:064x}"


def put(folder: Path, number: int, size: int) -> None:
    (folder / digest(number)).mkdir(parents=True)
    path = folder / digest(number) / "adapter.safetensors"
    path.write_bytes(b"x" * size)
    os.utime(path, (number, number))


def test_an_earlier_process_left_versions_and_rests(tmp_path: Path) -> None:
    for number, size in ((3, 30), (1, 10), (2, 20)):
        put(tmp_path, number, size)
    (tmp_path / ".partial-x").mkdir()
    (tmp_path / ".partial-x" / "adapter.safetensors").write_bytes(b"x")
    (tmp_path / ("f" * 32)).mkdir()
    (tmp_path / digest(9)).mkdir()
    (tmp_path / "notes.txt").write_text("of the operator")
    cache = AdapterCache(tmp_path, max_bytes=35, clock=Clock())
    cache.open()
    assert cache.num_bytes == 60
    assert not (tmp_path / ".partial-x").exists()
    assert cache.evict(()) == [digest(1), digest(2)]
    assert cache.num_bytes == 30
    cache.delete([digest(1), digest(2)])
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"f" * 32, digest(9), digest(3), "notes.txt"}


def test_a_version_whose_file_was_removed_is_not_there(tmp_path: Path) -> None:
    put(tmp_path, 1, 10)
    cache = AdapterCache(tmp_path, max_bytes=35, clock=Clock())
    assert not cache.touch(digest(1))
    cache.open()
    assert cache.touch(digest(1))
    (tmp_path / digest(1) / "adapter.safetensors").unlink()
    assert not cache.touch(digest(1))
    assert cache.num_bytes == 0


def test_a_missing_cache_folder_is_created(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path / "a" / "b", max_bytes=1, clock=Clock())
    cache.open()
    assert (tmp_path / "a" / "b").is_dir()


def test_the_least_recently_used_leave_first() -> None:
    clock = Clock()
    cache = AdapterCache(Path("unused"), max_bytes=20, clock=clock)
    for number in (1, 2, 3):
        cache.use(digest(number), 10)
        clock.now += 1
    cache.use(digest(1), 10)
    assert cache.evict(()) == []
    clock.now += KEPT_SECONDS
    assert cache.evict(()) == [digest(2)]
    assert digest(1) in cache
    assert digest(3) in cache


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 30)), max_size=30),
    st.sets(st.integers(0, 9)),
    st.integers(0, 60),
)
def test_nothing_needed_leaves_and_the_rest_fits(
    uses: list[tuple[int, int]], needed: set[int], max_bytes: int
) -> None:
    clock = Clock()
    cache = AdapterCache(Path("unused"), max_bytes=max_bytes, clock=clock)
    sizes: dict[str, int] = {}
    for number, size in uses:
        cache.use(digest(number), size)
        sizes[digest(number)] = size
    clock.now += KEPT_SECONDS
    kept = {digest(number) for number in needed}
    victims = cache.evict(kept)
    assert not kept & set(victims)
    assert len(victims) == len(set(victims))
    left = sizes.keys() - set(victims)
    assert cache.num_bytes == sum(sizes[one] for one in left)
    assert cache.num_bytes <= max_bytes or left <= kept
