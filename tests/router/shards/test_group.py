"""Shard groups and step channels with fake shards behind real gRPC servers on unix sockets."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from millrace_proto import generate_pb2 as pb
from millrace_router.config import RouterConfig
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import (
    AdapterNotLoaded,
    ShardBusy,
    ShardChanged,
    ShardError,
    ShardHung,
    ShardLost,
    StepFailed,
)
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.start.shards import StartupError, warm_up
from millrace_testing.adapters.fake_adapters import MODULE, FakeAdapters, version_of
from millrace_testing.router.fake_router import collect, ids_of, new_batcher, request, running
from millrace_testing.shards.fake_shard import FakeShard, continuation, serve_fake_shard

SECONDS = 30


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/shard"


async def test_info_and_capacity_are_the_shards(address: str) -> None:
    with serve_fake_shard(address, FakeShard(num_blocks=9, block_size=4)):
        shards = StepChannel(ShardGroup([address]))
        info = await shards.group.info()
        capacity = await shards.group.warm_up(
            max_batch_prefill_tokens=16,
            max_batch_size=4,
            max_concurrent_requests=8,
            max_input_tokens=None,
            max_total_tokens=20,
            max_batch_total_tokens=None,
        )
        await shards.group.health()
        await shards.close()
    assert (info.model_type, set(info.eos_token_ids), info.window_size) == ("fake", {96}, None)
    assert (capacity.num_blocks, capacity.max_input_tokens, capacity.max_total_tokens) == (
        9,
        19,
        20,
    )


async def test_streams_over_a_real_socket_have_their_own_tokens(address: str) -> None:
    shard = FakeShard()
    with serve_fake_shard(address, shard):
        shards = StepChannel(ShardGroup([address]))
        async with running(new_batcher(shards, shard)) as batcher:
            streams = [batcher.submit(request([i, i + 1], 9)) for i in range(20)]
            outputs = await asyncio.gather(*(collect(stream) for stream in streams))
        await shards.close()
    for i, events in enumerate(outputs):
        assert ids_of(events) == continuation([i, i + 1], 9)


async def test_a_stream_outlives_the_shard_that_computed_it(address: str) -> None:
    shard = FakeShard()
    shard.gate = Event()
    shards = StepChannel(ShardGroup([address]))
    with serve_fake_shard(address, shard) as server:
        async with running(new_batcher(shards, shard)) as batcher:
            stream = batcher.submit(request([1, 2, 3], 5))
            while len(shard.steps) < 2:
                await asyncio.sleep(0.01)
            stopped = server.stop(grace=None)
            shard.gate.set()
            await asyncio.to_thread(stopped.wait)
            fresh = FakeShard()
            with serve_fake_shard(address, fresh):
                assert ids_of(await collect(stream)) == continuation([1, 2, 3], 5)
                assert fresh.steps, "the second shard was not asked"
                events = await collect(batcher.submit(request([4, 5], 5)))
            assert ids_of(events) == continuation([4, 5], 5)
    await shards.close()


async def test_shards_started_anew_are_warmed_up_again(address: str) -> None:
    shards = StepChannel(ShardGroup([address]))
    limits = {"max_input_tokens": None, "max_total_tokens": 20, "max_batch_total_tokens": None}
    sizes = {"max_batch_prefill_tokens": 16, "max_batch_size": 4, "max_concurrent_requests": 8}
    with serve_fake_shard(address, FakeShard()):
        await shards.group.warm_up(**sizes, **limits)
        await shards.open()
    # The new shard has more memory; the capacity stays as it was at the first warm-up.
    cold = FakeShard(num_blocks=500)
    cold.is_warm = False
    with serve_fake_shard(address, cold):
        await shards.open()
    assert cold.is_warm
    smaller = FakeShard(num_blocks=5)
    smaller.is_warm = False
    with serve_fake_shard(address, smaller), pytest.raises(ShardError, match="Not enough memory"):
        await shards.open()
    await shards.close()


async def test_every_rank_gets_every_step(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path}/{rank}" for rank in range(2)]
    ranks = [FakeShard(), FakeShard()]
    with (
        serve_fake_shard(addresses[0], ranks[0], rank=0, world_size=2),
        serve_fake_shard(addresses[1], ranks[1], rank=1, world_size=2),
    ):
        shards = StepChannel(ShardGroup(list(reversed(addresses))))
        assert (await shards.group.info()).world_size == 2
        async with running(new_batcher(shards, ranks[0])) as batcher:
            events = await collect(batcher.submit(request([7], 6)))
        await shards.close()
    assert ids_of(events) == continuation([7], 6)
    assert [step.SerializeToString() for step in ranks[0].steps] == [
        step.SerializeToString() for step in ranks[1].steps
    ]


class StrayShard(FakeShard):
    """A rank that samples another token once."""

    has_strayed = False

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        response = super().step(request)
        if request.WhichOneof("work") == "decode" and not self.has_strayed:
            self.has_strayed = True
            response.checksum += 1
        return response


async def test_a_step_that_ranks_disagree_about_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [f"unix:{tmp_path}/{rank}" for rank in range(2)]
    ranks = [FakeShard(), StrayShard()]
    failures: list[str] = []
    with (
        serve_fake_shard(addresses[0], ranks[0], rank=0, world_size=2),
        serve_fake_shard(addresses[1], ranks[1], rank=1, world_size=2),
    ):
        shards = StepChannel(ShardGroup(addresses))
        monkeypatch.setattr(shards, "report_failure", lambda _, error: failures.append(str(error)))
        await shards.group.info()
        async with running(new_batcher(shards, ranks[0])) as batcher:
            events = await collect(batcher.submit(request([7], 6)))
        await shards.close()
    assert failures == ["the ranks of the group disagree about a step"]
    assert ids_of(events) == continuation([7], 6)


class Rank:
    """A rank that answers no step."""

    def __init__(self, error: Exception | None, *, after: int = 0) -> None:
        """`error` comes in the turn `after` of the loop; None: it waits in a collective for ever."""
        self._error, self._after = error, after

    async def read(self) -> pb.StepResponse:
        if self._error is None:
            await asyncio.Future[None]()
        for _ in range(self._after):
            await asyncio.sleep(0)
        assert self._error is not None
        raise self._error


FAILED, GONE = StepFailed("a collective failed"), ShardLost("killed")


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([FAILED, GONE], ShardLost),
        ([FAILED, FAILED, asyncio.InvalidStateError()], ShardLost),
        ([GONE, FAILED], ShardLost),
        ([FAILED, FAILED], StepFailed),
        ([FAILED, ShardError("a defect")], StepFailed),
        ([FAILED, GONE, None], ShardLost),
        ([FAILED, None], StepFailed),
    ],
)
async def test_a_step_that_fails_with_the_loss_of_a_rank_is_a_loss(
    errors: list[Exception | None], kind: type[ShardError], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = ShardGroup([f"unix:/{rank}" for rank in range(len(errors))])
    ranks = [Rank(error, after=3 * rank) for rank, error in enumerate(errors)]
    with monkeypatch.context() as patch:
        patch.setattr(group, "_shards", ranks)
        with pytest.raises(ShardError) as raised:
            await group.read()
    await group.close()
    assert type(raised.value) is kind


async def fails(call: Awaitable[object]) -> bool:
    try:
        await call
    except ShardError:
        return True
    return False


async def test_calls_that_find_no_shard_leave_nothing_that_connects_later(tmp_path: Path) -> None:
    """A failed call keeps its channel, which connects to the next shard, as long as anything keeps the call."""
    channel = StepChannel(ShardGroup([f"unix:{tmp_path}/nobody"] * 2))
    channel.epoch = 1
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert await fails(channel.open())
            assert await fails(channel.group.load_adapter(1, 0, "digest", timeout=1.0))
        # The event loop lets the last errors go in its next rounds.
        await asyncio.gather(channel.reset(), channel.reset())
        calls = [each for each in gc.get_objects() if isinstance(each, grpc.aio.UnaryUnaryCall)]
    finally:
        gc.enable()
        await channel.close()
    assert calls == []


async def test_a_group_that_is_not_one_is_refused(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path}/{rank}" for rank in range(2)]
    with (
        serve_fake_shard(addresses[0], FakeShard(), rank=0, world_size=2),
        serve_fake_shard(addresses[1], FakeShard(), rank=0, world_size=2),
    ):
        shards = StepChannel(ShardGroup(addresses))
        with pytest.raises(ShardError, match="ranks"):
            await shards.group.info()
        await shards.close()


async def test_a_group_with_missing_ranks_names_its_size(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with serve_fake_shard(address, FakeShard(), rank=0, world_size=2):
        group = ShardGroup([address])
        with pytest.raises(ShardError, match=r"ranks \[0\] of 2"):
            await group.info()
        await group.close()


@contextmanager
def group_of(folder: Path, ranks: Sequence[FakeShard]) -> Iterator[list[str]]:
    """The addresses of one group."""
    addresses = [f"unix:{folder}/{rank}" for rank in range(len(ranks))]
    with ExitStack() as stack:
        for rank, (address, shard) in enumerate(zip(addresses, ranks, strict=True)):
            stack.enter_context(serve_fake_shard(address, shard, rank=rank, world_size=len(ranks)))
        yield addresses


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attention", "plain", "rank 2 differs from rank 0: attention is plain instead of none$"),
        ("activations", "int8", "rank 2 .*: quantize_activations is int8 instead of exact$"),
        ("block_size", 16, "rank 2 differs from rank 0: block_size is 16 instead of 4$"),
        ("deterministic", True, "rank 2 .* deterministic is True instead of False$"),
        ("max_draft_tokens", 3, "rank 2 .* max_draft_tokens is 3 instead of 0$"),
    ],
)
async def test_a_rank_that_differs_ends_the_start(
    tmp_path: Path, name: str, value: object, words: str
) -> None:
    ranks = [FakeShard() for _ in range(3)]
    setattr(ranks[2], name, value)
    with group_of(tmp_path, ranks) as addresses:
        # Rank 0 is not the first of the addresses.
        shards = StepChannel(ShardGroup(addresses[::-1]))
        config = RouterConfig(model_folder=Path("/nowhere"), shard_addresses=tuple(addresses))
        with pytest.raises(StartupError, match=words):
            await warm_up(config, shards.group)
        await shards.close()


async def test_ranks_that_come_back_different_get_no_step(tmp_path: Path) -> None:
    limits = {"max_input_tokens": None, "max_total_tokens": 20, "max_batch_total_tokens": None}
    sizes = {"max_batch_prefill_tokens": 16, "max_batch_size": 4, "max_concurrent_requests": 8}
    with group_of(tmp_path, [FakeShard(), FakeShard()]) as addresses:
        shards = StepChannel(ShardGroup(addresses))
        await shards.group.info()
        await shards.group.warm_up(**sizes, **limits)
        await shards.open()
    changed = [FakeShard(), FakeShard()]
    changed[1].attention = "plain"
    for shard in changed:
        shard.is_warm = False
    with group_of(tmp_path, changed):
        for _ in range(2):
            with pytest.raises(ShardChanged, match="rank 1 differs from rank 0: attention"):
                await shards.open()
    assert not any(shard.steps or shard.is_warm for shard in changed)
    await shards.close()


class Computing(ShardGroup):
    """A group that computes until it is asked for its pulse for the `until`th time."""

    def __init__(self, until: int) -> None:
        super().__init__(["unix:/nowhere"], silence_seconds=0.004)
        self.until = until
        self.num_asked = 0
        self.has_computed = asyncio.Event()

    async def pulse(self) -> int:
        self.num_asked += 1
        if self.num_asked == self.until:
            self.has_computed.set()
        return min(self.num_asked, self.until)


async def test_a_call_behind_slow_steps_waits_as_long_as_they_compute() -> None:
    group = Computing(until=50)
    await group.while_computing(group.has_computed.wait(), "it hangs")
    assert group.num_asked == 50
    await group.close()


async def test_a_call_behind_a_step_that_hangs_is_cancelled() -> None:
    group, never = Computing(until=1), asyncio.Event()
    call = asyncio.ensure_future(never.wait())
    with pytest.raises(ShardHung, match="it hangs"):
        await group.while_computing(call, "it hangs")
    assert call.cancelled()
    assert group.num_asked == 4
    await group.close()


async def test_an_absent_shard_is_an_error_not_a_hang(address: str) -> None:
    shards = StepChannel(ShardGroup([address]))
    with pytest.raises(ShardError):
        await shards.group.info(timeout=0.3)
    with pytest.raises(ShardError):
        await shards.group.health()
    await shards.close()


@asynccontextmanager
async def held_step(address: str) -> AsyncIterator[tuple[StepChannel, FakeShard, grpc.Server]]:
    """A channel with a step in flight, which the shard answers after its gate is set."""
    shard = FakeShard()
    shard.gate = Event()
    shards = StepChannel(ShardGroup([address]))
    with serve_fake_shard(address, shard) as server:
        await shards.open()
        await shards.send(StepPlan())
        assert not await shards.answers_within(0.001)
        try:
            yield shards, shard, server
        finally:
            shard.gate.set()
            await shards.close()


async def test_an_answer_may_be_waited_for_with_a_limit(address: str) -> None:
    async with held_step(address) as (shards, shard, _):
        assert not await shards.answers_within(0.001)
        assert shard.gate is not None
        shard.gate.set()
        assert await shards.answers_within(SECONDS)
        assert (await shards.receive()).number == 1
        await shards.send(StepPlan())
        assert (await shards.receive()).number == 2


async def test_waiting_with_a_limit_ends_with_the_shard(address: str) -> None:
    async with held_step(address) as (shards, shard, server):
        stopped = server.stop(grace=None)
        assert await shards.answers_within(SECONDS)
        assert shard.gate is not None
        shard.gate.set()
        await asyncio.to_thread(stopped.wait)
        with pytest.raises(ShardLost):
            await shards.receive()


async def test_pending_answers_are_forgotten_with_their_epoch(address: str) -> None:
    async with held_step(address) as (shards, shard, _):
        assert shard.gate is not None
        shard.gate.set()
        await shards.open()
        await shards.send(StepPlan())
        assert (await shards.receive()).number == 1


async def test_adapters_are_loaded_on_every_rank_and_named_by_sequences(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path}/{rank}" for rank in range(2)]
    ranks = [FakeShard(adapters=FakeAdapters(max_adapters=2, num_pages=3)) for _ in range(2)]
    version = version_of("one")
    with (
        serve_fake_shard(addresses[0], ranks[0], rank=0, world_size=2),
        serve_fake_shard(addresses[1], ranks[1], rank=1, world_size=2),
    ):
        shards = StepChannel(ShardGroup(addresses))
        info = await shards.group.info()
        assert info.adapter_modules == (MODULE,)
        assert info.adapter_modules[0].bytes_per_slice == MODULE.bytes_per_slice
        await shards.open()
        await shards.group.load_adapter(shards.epoch, 1, version.digest, timeout=SECONDS)
        assert [rank.adapters.slots for rank in ranks] == [{1: version.digest}] * 2
        ranks[1].adapters.errors["bad"] = "the file is gone"
        with pytest.raises(AdapterNotLoaded, match="the file is gone"):
            await shards.group.load_adapter(shards.epoch, 2, "bad", timeout=SECONDS)
        with pytest.raises(ShardError, match="another epoch"):
            await shards.group.load_adapter(1, 2, "other", timeout=SECONDS)
        await shards.group.unload_adapter(shards.epoch, 2, timeout=SECONDS)
        ranks[0].adapters.pages["large"] = 3
        with pytest.raises(ShardBusy, match="no pages"):
            await shards.group.load_adapter(shards.epoch, 2, "large", timeout=SECONDS)
        await shards.group.unload_adapter(shards.epoch, 1, timeout=SECONDS)
        await shards.close()
    assert ranks[0].adapters.slots == {}


async def test_restarted_shards_get_the_same_pages_for_adapters(address: str) -> None:
    shards = StepChannel(ShardGroup([address]))
    first = FakeShard(adapters=FakeAdapters(max_adapters=2, num_pages=7))
    with serve_fake_shard(address, first):
        capacity = await shards.group.warm_up(max_adapters=2)
        await shards.open()
    fresh = FakeShard(adapters=FakeAdapters(max_adapters=2, num_pages=9))
    fresh.is_warm = False
    with serve_fake_shard(address, fresh):
        await shards.open()
    await shards.close()
    assert capacity.adapter_pages == fresh.adapters.num_pages == 7


async def test_a_shard_killed_while_it_loads_is_followed_by_one_that_loads_again(
    address: str,
) -> None:
    version = version_of("one")
    shard = FakeShard(adapters=FakeAdapters(max_adapters=2, num_pages=3))
    gate = shard.adapters.gates[version.digest] = Event()
    shards = StepChannel(ShardGroup([address]))
    with serve_fake_shard(address, shard) as server:
        async with running(new_batcher(shards, shard)) as batcher:
            base = batcher.submit(request([4, 5], 5))
            assert ids_of(await collect(base)) == continuation([4, 5], 5)
            stream = batcher.submit(request([1, 2, 3], 5, version))
            while not shard.adapters.num_asked:
                await asyncio.sleep(0.01)
            stopped = server.stop(grace=None)
            gate.set()
            await asyncio.to_thread(stopped.wait)
            fresh = FakeShard(adapters=FakeAdapters(max_adapters=2, num_pages=3))
            with serve_fake_shard(address, fresh):
                events = await collect(stream)
            assert ids_of(events) == continuation([1, 2, 3], 5, adapter=version.digest)
            assert fresh.adapters.loads == [version.digest]
    await shards.close()


def fakes(
    ranks: ExitStack, folder: Path, groups: Sequence[int]
) -> tuple[ShardGroup, list[FakeShard]]:
    """Ranks behind sockets, each of one of the `groups`."""
    shards = [FakeShard() for _ in groups]
    addresses = [f"unix:{folder}/rank-{rank}" for rank in range(len(groups))]
    for rank, (shard, group) in enumerate(zip(shards, groups, strict=True)):
        shard.group = group
        ranks.enter_context(
            serve_fake_shard(addresses[rank], shard, rank=rank, world_size=len(groups))
        )
    return ShardGroup(addresses), shards


async def test_ranks_of_two_groups_are_never_taken_together(tmp_path: Path) -> None:
    with ExitStack() as ranks:
        group, shards = fakes(ranks, tmp_path, [7, 8])
        with pytest.raises(ShardError, match="different groups"):
            await group.info()
        # Whose ranks they are is not known, so none is ended.
        assert not await group.end("a rank is lost")
        await group.close()
    assert [shard.ended for shard in shards] == [[], []]


async def test_only_ranks_of_the_group_are_ended(tmp_path: Path) -> None:
    with ExitStack() as ranks:
        group, shards = fakes(ranks, tmp_path, [7, 7])
        await group.info()
        shards[1].group = 8
        assert await group.end("rank 1 is lost")
        assert not await group.end("rank 1 is lost")
        await group.close()
    assert [shard.ended for shard in shards] == [["rank 1 is lost"], []]


def shard_with(
    *,
    attention: str = "cpu",
    activations: str = "exact",
    block_size: int = 4,
    deterministic: bool = True,
    is_warm: bool = True,
) -> FakeShard:
    shard = FakeShard(block_size=block_size)
    shard.attention, shard.deterministic, shard.is_warm = attention, deterministic, is_warm
    shard.activations = activations
    return shard


async def warm_up_within_limit(shards: StepChannel) -> None:
    await shards.group.info()
    await shards.group.warm_up(
        max_batch_prefill_tokens=16,
        max_batch_size=4,
        max_concurrent_requests=8,
        max_input_tokens=None,
        max_total_tokens=20,
        max_batch_total_tokens=None,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention": "plain", "block_size": 2}, "another KV capacity"),
        ({"attention": "plain"}, "plain attention"),
        ({"activations": "int8"}, "and int8 activations"),
    ],
)
async def test_no_epoch_begins_on_other_shards_however_often_it_is_tried(
    address: str, change: dict[str, Any], words: str
) -> None:
    shards = StepChannel(ShardGroup([address]))
    changed = shard_with(**change, is_warm=False)
    with serve_fake_shard(address, shard_with()):
        await warm_up_within_limit(shards)
        await shards.open()
    with serve_fake_shard(address, changed):
        # The second time, the shards are warmed up.
        for _ in range(2):
            with pytest.raises(ShardChanged, match=words):
                await shards.open()
    assert not changed.steps
    same = shard_with(is_warm=False)
    with serve_fake_shard(address, same):
        await shards.open()
    assert same.is_warm
    await shards.close()


async def test_other_kernels_may_take_over_where_no_bits_are_promised(address: str) -> None:
    shards = StepChannel(ShardGroup([address]))
    with serve_fake_shard(address, shard_with(deterministic=False)):
        await warm_up_within_limit(shards)
        await shards.open()
    changed = shard_with(attention="plain", deterministic=False, is_warm=False)
    with serve_fake_shard(address, changed):
        await shards.open()
    await shards.close()


async def test_a_restart_is_requested_until_the_shards_are_as_before(address: str) -> None:
    changed = shard_with(block_size=2, is_warm=False)
    asked = asyncio.Event()

    class Launcher(LauncherChannel):
        @property
        def is_open(self) -> bool:
            return True

        def restart_shards(self, reason: str) -> None:
            assert "another KV capacity" in reason
            asked.set()

    shards, first = StepChannel(ShardGroup([address])), shard_with()
    batcher = new_batcher(shards, first, launcher=Launcher(None))
    with serve_fake_shard(address, first):
        await warm_up_within_limit(shards)
    async with running(batcher), asyncio.timeout(SECONDS):
        stream = batcher.submit(request([1, 2, 3], 5))
        with serve_fake_shard(address, changed):
            await asked.wait()
        with serve_fake_shard(address, shard_with(is_warm=False)):
            assert ids_of(await collect(stream)) == continuation([1, 2, 3], 5)
    assert not changed.steps
    await shards.close()
