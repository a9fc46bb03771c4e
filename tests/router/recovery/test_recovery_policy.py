"""The batcher with shards that fail: recomputation, the poison search, OOM backoff and hangs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_proto import generate_pb2 as pb
from millrace_router.engine.batcher import Batcher
from millrace_router.errors import DoesNotFit, Quarantined, ShardsGone
from millrace_router.recovery import hang_detector
from millrace_router.recovery.hang_detector import StepTimer
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.recovery_policy import STEPS_BEFORE_RELIEF, OomBackoff
from millrace_router.request.token_stream import TokenEvent
from millrace_router.scheduler.step_plan import Budgets
from millrace_router.shards.errors import ShardLost
from millrace_router.shards.step_result import StepResult
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    ids_of,
    new_batcher,
    next_token,
    request,
    running,
)
from millrace_testing.shards.fake_shard import FakeShard, continuation


class FakeLauncher(LauncherChannel):
    """Records its calls."""

    def __init__(self) -> None:
        super().__init__(None)
        self.said: list[str] = []

    @property
    def is_open(self) -> bool:
        return True

    def report_progress(self) -> None:
        self.said.append("progress")

    def restart_shards(self, reason: str) -> None:
        self.said.append(f"restart: {reason}")

    def report_suspects(self, count: int) -> None:
        self.said.append(f"suspects: {count}")


class DyingShards(DirectShards):
    """Shards that the test takes away, with the steps in flight, and brings back.

    A step that hangs exceeds its limit at the second tick; no other step does.
    """

    def __init__(self, shard: FakeShard) -> None:
        super().__init__(shard)
        self.is_there = True
        self.hangs = False

    async def health(self) -> bool:
        if not self.is_there:
            raise ShardLost("no shard there")
        return True

    async def open(self) -> None:
        if not self.is_there:
            raise ShardLost("no shard there")
        await super().open()

    async def receive(self) -> StepResult:
        await asyncio.sleep(0)
        if self.hangs:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(StepTimer, "limit_seconds", lambda self, load: 0.0)
                self.hangs = False
                await asyncio.Event().wait()
        if not self.is_there:
            raise ShardLost("the stream has ended")
        return await super().receive()


@asynccontextmanager
async def serving(
    shards: DirectShards, shard: FakeShard, **options: object
) -> AsyncIterator[tuple[Batcher, FakeLauncher]]:
    launcher = FakeLauncher()
    batcher = new_batcher(shards, shard, launcher=launcher, **options)  # type: ignore[arg-type]
    async with running(batcher):
        yield batcher, launcher


def outcome(result: list[TokenEvent] | BaseException) -> list[int] | BaseException:
    return result if isinstance(result, BaseException) else ids_of(result)


@pytest.mark.parametrize("count", [1, 2, 7, 16])
@pytest.mark.parametrize("place", [0, -1])
async def test_poison_requests_are_quarantined_and_the_others_get_their_tokens(
    count: int, place: int
) -> None:
    shard = FakeShard(num_blocks=256)
    prompts = [[i, i + 1, i + 2] for i in range(count)]
    harmless = {
        token for prompt in [*prompts, [5]] for token in (*prompt, *continuation(prompt, 12))
    }
    poison = shard.poison_id = next(token for token in range(90) if token not in harmless)
    prompts[place] = [3, poison, 4]
    async with serving(DirectShards(shard), shard) as (batcher, launcher):
        streams = [batcher.submit(request(prompt, 12)) for prompt in prompts]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
        assert isinstance(results.pop(place), Quarantined)
        prompts.pop(place)
        assert list(map(outcome, results)) == [continuation(prompt, 12) for prompt in prompts]
        (record,) = batcher._recovery.quarantine.to_json()
        with pytest.raises(Quarantined):
            batcher.submit(request([3, poison, 4], 12))
        num_epochs = sum(step.WhichOneof("work") == "open" for step in shard.steps)
        assert num_epochs <= 1 + 3 * (2 * math.log2(count) + 2)
        await collect(batcher.submit(request([5], 3)))
    assert (record["prompt_tokens"], record["generated_tokens"]) == (3, 0)
    assert any(said.startswith("suspects") for said in launcher.said)
    assert shard.blocks_in_use == 0


async def test_poison_that_acts_only_after_some_tokens_is_detected() -> None:
    """It fails as a decode first, and then as a part of the prompt."""
    shard = FakeShard(num_blocks=256)
    expected = continuation([1, 2], 20)
    shard.poison_id = expected[9]
    prompts = [[1, 2], [5, 5, 5]]
    assert shard.poison_id not in continuation(prompts[1], 20)
    async with serving(DirectShards(shard), shard) as (batcher, _):
        bad, good = (batcher.submit(request(prompt, 20)) for prompt in prompts)
        assert ids_of(await collect(good)) == continuation(prompts[1], 20)
        with pytest.raises(Quarantined):
            await collect(bad)


class CrowdedShard(FakeShard):
    """Steps of more than `most_rows` rows fail."""

    most_rows = 1
    num_failures = 0

    def _is_poisoned(self, request: pb.StepRequest) -> bool:
        work = request.prefill if request.WhichOneof("work") == "prefill" else request.decode
        num_rows = len(work.decode_slots) + len(request.prefill.chunk_slots)
        is_crowded = num_rows > self.most_rows
        self.num_failures += is_crowded
        return is_crowded


@pytest.mark.parametrize("most_rows", [1, 3])
async def test_a_fault_that_needs_several_requests_ends_and_loses_no_token(most_rows: int) -> None:
    shard = CrowdedShard(num_blocks=256)
    shard.most_rows = most_rows
    prompts = [[i, i + 1] for i in range(8)]
    async with serving(DirectShards(shard), shard) as (batcher, _):
        streams = [batcher.submit(request(prompt, 40)) for prompt in prompts]
        results = await asyncio.gather(*map(collect, streams))
        late = await collect(batcher.submit(request([5], 3)))
    assert [ids_of(events) for events in results] == [continuation(p, 40) for p in prompts]
    assert ids_of(late) == continuation([5], 3)
    assert not batcher._recovery.quarantine.to_json()
    # Each in the first search, and once more in the separate groups.
    assert shard.num_failures <= 2 * (math.ceil(math.log2(len(prompts))) + 1)
    assert shard.blocks_in_use == 0


def is_recovering(batcher: Batcher) -> bool:
    return batcher._epochs.status.since is not None


async def test_a_lost_epoch_loses_no_token_and_waiting_requests_keep_waiting() -> None:
    shard = FakeShard(num_blocks=256)
    shards = DyingShards(shard)
    async with serving(shards, shard, max_batch_size=2) as (batcher, launcher):
        streams = [batcher.submit(request([i], 15)) for i in range(4)]
        for _ in range(3):
            await next_token(streams[0])
        for _ in range(3):
            shards.is_there = False
            while not is_recovering(batcher):
                await asyncio.sleep(0)
            late = batcher.submit(request([9], 2))
            shards.is_there = True
            while is_recovering(batcher):
                await asyncio.sleep(0)
            assert ids_of(await collect(late)) == continuation([9], 2)
        rest = [await collect(stream) for stream in streams]
    tokens = [[event.token.id for event in events] for events in rest]
    assert [continuation([0], 15)[3:], *(continuation([i], 15) for i in (1, 2, 3))] == tokens
    assert not batcher._recovery.quarantine.to_json()
    assert "progress" in launcher.said


async def test_a_step_that_hangs_has_the_shards_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "TICK_SECONDS", 0.001)
    shard = FakeShard(num_blocks=256)
    shards = DyingShards(shard)
    async with serving(shards, shard) as (batcher, launcher):
        stream = batcher.submit(request([1], 10))
        await next_token(stream)
        shards.hangs = True
        tokens = [event.token.id for event in await collect(stream)]
    assert tokens == continuation([1], 10)[1:]
    (restart,) = [said for said in launcher.said if said.startswith("restart")]
    assert "does not end" in restart


class SlowShards(DirectShards):
    """Each step lasts until the router has asked for a sign of life `NUM_PULSES` times."""

    NUM_PULSES = 50

    def __init__(self, shard: FakeShard) -> None:
        super().__init__(shard)
        self.num_pulses = 0
        self.asked = asyncio.Event()

    async def pulse(self) -> int:
        self.num_pulses += 1
        self.asked.set()
        return self.num_pulses

    async def receive(self) -> StepResult:
        until = self.num_pulses + self.NUM_PULSES
        while self.num_pulses < until:
            self.asked.clear()
            await self.asked.wait()
        return await super().receive()


async def test_a_shard_slowed_to_a_hundredth_serves_a_long_prompt_without_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hang_detector, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(hang_detector, "HEARTBEAT_SECONDS", 0.0)
    # Some ticks, of which each step takes about 50.
    monkeypatch.setattr(StepTimer, "limit_seconds", lambda self, load: 0.01)
    shard = FakeShard(num_blocks=256)
    shards = SlowShards(shard)
    prompt = [number % 50 for number in range(300)]
    async with serving(shards, shard, max_batch_prefill_tokens=100) as (batcher, launcher):
        assert ids_of(await collect(batcher.submit(request(prompt, 2)))) == continuation(prompt, 2)
    assert shards.num_pulses >= 4 * shards.NUM_PULSES
    assert launcher.said == ["progress"]


async def test_shards_that_are_lost_while_idle_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_detector, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(hang_detector, "HEARTBEAT_SECONDS", 0.0)
    shard = FakeShard()
    shards = DyingShards(shard)
    async with serving(shards, shard) as (batcher, _):
        await collect(batcher.submit(request([1], 2)))
        shards.is_there = False
        while batcher._epochs.status.since is None:
            await asyncio.sleep(0.01)
        shards.is_there = True
        assert ids_of(await collect(batcher.submit(request([2], 2)))) == continuation([2], 2)
    assert not batcher._recovery.quarantine.to_json()


async def test_requests_fail_when_the_shards_do_not_come_back() -> None:
    shard = FakeShard()
    shards = DyingShards(shard)
    async with serving(shards, shard, grace_seconds=0.0, max_batch_size=1) as (batcher, _):
        streams = [batcher.submit(request([i], 30)) for i in range(3)]
        await next_token(streams[0])
        shards.is_there = False
        for stream in streams:
            with pytest.raises(ShardsGone):
                await collect(stream)
        with pytest.raises(ShardsGone):
            batcher.submit(request([1], 2))
        shards.is_there = True
        while batcher._epochs.status.since is not None:
            await asyncio.sleep(0.01)
        assert ids_of(await collect(batcher.submit(request([2], 2)))) == continuation([2], 2)


async def test_when_the_launcher_gives_up_every_client_gets_an_error() -> None:
    shard = FakeShard()
    shards = DyingShards(shard)
    async with serving(shards, shard, max_batch_size=1) as (batcher, launcher):
        streams = [batcher.submit(request([i], 30)) for i in range(3)]
        await next_token(streams[0])
        shards.is_there = False
        launcher.on_gave_up("it crashes again and again")
        for stream in streams:
            with pytest.raises(ShardsGone, match=r"again and again|no shard there"):
                await collect(stream)
        with pytest.raises(ShardsGone):
            batcher.submit(request([1], 2))


async def test_a_planned_restart_makes_no_request_a_suspect() -> None:
    shard = FakeShard()
    shards = DyingShards(shard)
    async with serving(shards, shard) as (batcher, launcher):
        stream = batcher.submit(request([1], 20))
        await next_token(stream)
        launcher.on_restarting(True, "SIGHUP")
        shards.is_there = False
        while not batcher._recovery.planner.num_paused:
            await asyncio.sleep(0)
        assert not batcher._recovery.is_searching
        shards.is_there = True
        await collect(stream)
    assert not any(said.startswith("suspects") for said in launcher.said)


@pytest.mark.parametrize("most_tokens", [4, 5, 11])
async def test_steps_become_smaller_until_they_fit(most_tokens: int) -> None:
    shard = FakeShard(num_blocks=256)
    shard.most_tokens = most_tokens
    prompts = [[i] * 20 for i in range(6)]
    async with serving(DirectShards(shard), shard, max_batch_prefill_tokens=64) as (batcher, _):
        streams = [batcher.submit(request(prompt, 8)) for prompt in prompts]
        results = await asyncio.gather(*map(collect, streams))
    assert [ids_of(events) for events in results] == [continuation(p, 8) for p in prompts]


async def test_only_the_request_that_does_not_fit_fails() -> None:
    shard = FakeShard(num_blocks=256)
    shard.most_tokens = 3
    async with serving(DirectShards(shard), shard, max_batch_prefill_tokens=64) as (batcher, _):
        streams = [batcher.submit(request([i] * length, 1)) for i, length in enumerate((20, 3, 2))]
        results = await asyncio.gather(*map(collect, streams), return_exceptions=True)
    assert isinstance(results[0], DoesNotFit)
    assert list(map(outcome, results[1:])) == [continuation([1] * 3, 1), continuation([2] * 2, 1)]


def backoff(prefill: int = 4096, rows: int = 32, block_size: int = 64) -> OomBackoff:
    budgets = Budgets(max_batch_prefill_tokens=prefill, max_batch_size=rows, spare_slots=8)
    return OomBackoff(budgets, block_size=block_size)


def test_each_failure_halves_and_success_doubles_again() -> None:
    one = backoff()
    assert one.is_off
    assert one.shrink()
    assert one.shrink()
    assert (one.budgets.max_batch_prefill_tokens, one.budgets.max_batch_size) == (1024, 8)
    assert [one.succeeded() for _ in range(STEPS_BEFORE_RELIEF)].count(True) == 1
    assert (one.budgets.max_batch_prefill_tokens, one.budgets.max_batch_size) == (2048, 16)
    for _ in range(STEPS_BEFORE_RELIEF):
        one.succeeded()
    assert one.is_off
    assert not one.succeeded()


def test_a_failure_begins_the_count_of_successes_anew() -> None:
    one = backoff()
    one.shrink()
    for _ in range(STEPS_BEFORE_RELIEF - 1):
        assert not one.succeeded()
    one.shrink()
    assert not one.succeeded()


@given(st.integers(1, 10_000), st.integers(1, 512), st.integers(1, 128))
def test_the_backoff_ends_with_one_row_and_one_block_and_recovers(
    prefill: int, rows: int, block_size: int
) -> None:
    one = backoff(prefill, rows, block_size)
    full, num_rises = one.budgets, 0
    while one.shrink():
        num_rises += 1
        assert num_rises < 20
    assert one.budgets.max_batch_size == 1
    assert one.budgets.max_batch_prefill_tokens == min(prefill, block_size)
    assert one.budgets.num_slots - one.budgets.max_batch_size == full.spare_slots
    while not one.is_off:
        one.succeeded()
    assert one.budgets == full
