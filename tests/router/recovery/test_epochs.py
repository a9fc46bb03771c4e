"""Epochs while shards are away: attempts, restarts, interrupts, hangs, and the status that routes see."""

from __future__ import annotations

import asyncio
import math
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from millrace_router.errors import RouterError
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.recovery import epochs
from millrace_router.recovery.epochs import EpochManager, GroupRestart, Interrupt
from millrace_router.recovery.hang_detector import SLOWEST, HangDetector, OldestStep, StepTimer
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.shard_status import NUM_REMEMBERED, Outage, ShardStatus
from millrace_router.shards.errors import ShardError, ShardHung, ShardLost
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics
from millrace_testing.shards.fake_shard import FakeShard, serve_fake_shard


class AbsentShards(StepChannel):
    """Two ranks that do not listen: each attempt reports the other one."""

    def __init__(self, num_attempts: int) -> None:
        super().__init__(ShardGroup(["unix:/none/0", "unix:/none/1"]))
        self._num_attempts = num_attempts
        self._attempts = count()

    async def open(self) -> None:
        """Fail `num_attempts` times."""
        number = next(self._attempts)
        if number < self._num_attempts:
            raise ShardLost(f"rank {number % 2} does not listen")


async def test_each_reason_of_an_outage_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "REOPEN_SECONDS", 0.0)
    channel, failed = AbsentShards(6), list[RouterError | None]()
    metrics = Metrics(max_input_tokens=8, max_total_tokens=9)
    manager = EpochManager(
        channel, LauncherChannel(None), ShardStatus(1.0), CostModel(), metrics, oldest=lambda: None
    )
    with capture_logs() as lines:
        await manager.open(failed.append)
    await channel.close()
    logged = [line["error"] for line in lines if line["event"].startswith("cannot open a stream")]
    assert len(failed) == 6
    assert logged == ["rank 0 does not listen", "rank 1 does not listen"]


async def test_shards_that_stay_out_of_reach_are_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "REOPEN_SECONDS", 0.0)
    channel, launcher = AbsentShards(3), Launcher()
    metrics = Metrics(max_input_tokens=8, max_total_tokens=9)
    manager = EpochManager(
        channel,
        launcher,
        ShardStatus(1.0),
        CostModel(),
        metrics,
        oldest=lambda: None,
        step_seconds=-1.0,
    )
    await manager.open(lambda _: None)
    await channel.close()
    assert launcher.asked == [f"rank {number % 2} does not listen" for number in range(3)]


def manager_of(channel: StepChannel, launcher: LauncherChannel) -> EpochManager:
    metrics = Metrics(max_input_tokens=8, max_total_tokens=9)
    return EpochManager(
        channel, launcher, ShardStatus(1.0), CostModel(), metrics, oldest=lambda: None
    )


async def test_shards_that_serve_again_are_tried_whatever_was_reported_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router may see that a socket is gone before its launcher reports the end of the shard."""
    monkeypatch.setattr(epochs, "REOPEN_SECONDS", 3600.0)
    channel, launcher = AbsentShards(1), LauncherChannel(None)
    manager = manager_of(channel, launcher)
    failed = list[RouterError | None]()

    def restart(refusal: RouterError | None) -> None:
        failed.append(refusal)
        assert len(failed) == 1, "only the shard that ended is out of reach"
        launcher.on_restarting(False, "killed by signal SIGKILL")
        asyncio.get_running_loop().call_soon(launcher.on_serving)

    watching = manager.watch()
    await manager.open(restart)
    watching.cancel()
    await channel.close()


async def test_shards_that_are_about_to_end_get_no_new_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would accept it until the launcher ends them, and an idle router would not miss it."""
    monkeypatch.setattr(epochs, "REOPEN_SECONDS", 3600.0)
    channel, launcher = AbsentShards(0), LauncherChannel(None)
    manager = manager_of(channel, launcher)
    watching = manager.watch()
    launcher.on_serving()
    launcher.on_restarting(True, "planned")
    with pytest.raises(ShardLost):
        async with manager.interrupt:
            pytest.fail("entered")
    opening = asyncio.create_task(manager.open(lambda _: None))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not opening.done()
    launcher.on_serving()
    await opening
    watching.cancel()
    await channel.close()


class Launcher(LauncherChannel):
    """A launcher that remembers what it is asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: list[str] = []

    @property
    def is_open(self) -> bool:
        return True

    def restart_shards(self, reason: str) -> None:
        self.asked.append(reason)


async def test_without_a_launcher_the_ranks_are_ended_until_an_epoch_begins(tmp_path: Path) -> None:
    with ExitStack() as ranks:
        shards = [FakeShard(), FakeShard()]
        addresses = [f"unix:{tmp_path}/{rank}" for rank in range(2)]
        for rank, shard in enumerate(shards):
            ranks.enter_context(serve_fake_shard(addresses[rank], shard, rank=rank, world_size=2))
        group = ShardGroup(addresses)
        await group.info()
        restart = GroupRestart(LauncherChannel(None), group)
        await restart.proceed()
        restart.rank_lost("rank 1 is gone")
        with pytest.raises(ShardLost, match="rank 1 is gone"):
            await restart.proceed()
        # All ranks are new, but for one that was not reached at first.
        shards[1].group = 1
        with pytest.raises(ShardLost, match="rank 1 is gone"):
            await restart.proceed()
        await restart.proceed()
        restart.finished()
        await restart.proceed()
        reason = "rank 1 is gone"
        assert [shard.ended for shard in shards] == [[reason], [reason, reason]]
        restart.request("a step does not end")
        await group.close()


async def test_a_launcher_restarts_its_own_ranks() -> None:
    launcher = Launcher()
    restart = GroupRestart(launcher, ShardGroup(["unix:/nowhere", "unix:/there"]))
    restart.rank_lost("rank 1 is gone")
    restart.request("a step does not end")
    await restart.proceed()
    assert launcher.asked == ["a step does not end"]


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_losing_a_single_rank_ends_no_request(tmp_path: Path, num_ranks: int) -> None:
    shards = [FakeShard() for _ in range(num_ranks)]
    addresses = [f"unix:{tmp_path}/{rank}" for rank in range(num_ranks)]
    with ExitStack() as ranks:
        for rank, shard in enumerate(shards):
            ranks.enter_context(
                serve_fake_shard(addresses[rank], shard, rank=rank, world_size=num_ranks)
            )
        group = ShardGroup(addresses)
        await group.info()
        restart = GroupRestart(LauncherChannel(None), group)
        restart.rank_lost("it is gone")
        if num_ranks == 1:
            await restart.proceed()
        else:
            with pytest.raises(ShardLost):
                await restart.proceed()
        await group.close()
    assert [bool(shard.ended) for shard in shards] == [num_ranks > 1] * num_ranks


async def test_the_launcher_of_another_host_s_ranks_has_none_to_restart() -> None:
    launcher = Launcher()
    restart = GroupRestart(launcher, ShardGroup(["127.0.0.1:1"]))
    restart.request("a step does not end")
    assert launcher.asked == []


class Trouble(Exception):  # noqa: N818
    pass


async def test_a_wait_ends_with_the_error() -> None:
    interrupt = Interrupt()
    asyncio.get_running_loop().call_soon(interrupt.trigger, Trouble("first"))
    with pytest.raises(Trouble, match="first"):
        async with interrupt:
            await asyncio.Event().wait()
    async with interrupt:
        await asyncio.sleep(0)


async def test_a_trigger_outside_the_context_ends_the_next_one_once() -> None:
    interrupt = Interrupt()
    interrupt.trigger(Trouble("first"))
    interrupt.trigger(Trouble("second"))
    with pytest.raises(Trouble, match="first"):
        async with interrupt:
            pytest.fail("entered")
    async with interrupt:
        await asyncio.sleep(0)


async def test_errors_of_the_inside_and_cancellation_come_out_as_they_are() -> None:
    interrupt = Interrupt()
    with pytest.raises(TimeoutError, match="own"):
        async with interrupt:
            raise TimeoutError("own")

    async def wait() -> None:
        async with interrupt:
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def outage(status: ShardStatus, clock: Clock, begin: float, end: float, *reasons: str) -> None:
    clock.now = begin
    for reason in reasons:
        status.begin_outage(reason)
    clock.now = end
    assert status.end_outage() == end - begin


def test_outages_are_cut_to_the_requested_time() -> None:
    clock = Clock()
    status = ShardStatus(clock=clock)
    outage(status, clock, 1.0, 3.0, "lost", "cannot connect")
    outage(status, clock, 5.0, 6.0, "hung")
    assert status.outages_between(0.0, 1.0) == status.outages_between(3.0, 5.0) == []
    assert status.outages_between(2.0, 5.5) == [
        Outage(2.0, 3.0, "lost"),
        Outage(5.0, 5.5, "hung"),
    ]


def test_an_outage_that_lasts_counts_up_to_the_end() -> None:
    clock = Clock()
    status = ShardStatus(clock=clock)
    clock.now = 2.0
    status.begin_outage("lost")
    clock.now = 4.0
    status.begin_outage("cannot connect")
    assert status.outages_between(0.0, 4.0) == [Outage(2.0, 4.0, "lost")]


def test_the_number_of_remembered_outages_is_bounded() -> None:
    clock = Clock()
    status = ShardStatus(clock=clock)
    for number in range(NUM_REMEMBERED + 2):
        outage(status, clock, number, number + 0.5, "lost")
    outages = status.outages_between(0.0, 1000.0)
    assert (len(outages), outages[0].began_at) == (NUM_REMEMBERED, 2.0)


LOAD = StepLoad(decodes=1, context=10)


def ticks_until_hung(timer: StepTimer, step: object, load: StepLoad = LOAD) -> int:
    for number in range(1, 100_000):
        if timer.is_hung(step, load, timer.tick_seconds):
            return number
    raise AssertionError("never")


def test_a_step_gets_the_floor_while_nothing_is_known_of_its_cost() -> None:
    timer = StepTimer(30.0, CostModel())
    assert ticks_until_hung(timer, object()) == pytest.approx(30 / timer.tick_seconds, abs=3)


def test_a_step_that_is_predicted_to_be_long_gets_a_multiple_of_that() -> None:
    cost = CostModel.fixed(dict.fromkeys(COEFFICIENTS, 0.0) | {"step": 2.0})
    timer = StepTimer(30.0, cost)
    assert timer.limit_seconds(LOAD) == pytest.approx(SLOWEST * 2.0)
    expected = SLOWEST * 2.0 / timer.tick_seconds
    assert ticks_until_hung(timer, object()) == pytest.approx(expected, abs=3)


def test_limits_grow_with_tokens_before_the_first_prediction() -> None:
    timer = StepTimer(30.0, CostModel())
    loads = [StepLoad(prefill_tokens=tokens) for tokens in (1, 256, 4096)]
    assert [timer.limit_seconds(load) for load in loads] == [30.0, 30.0, 480.0]


def test_a_step_that_goes_on_never_hangs() -> None:
    timer, step = StepTimer(30.0, CostModel()), object()
    for pulse in range(10_000):
        assert not timer.is_hung(step, LOAD, timer.tick_seconds)
        timer.felt(step, pulse)


@pytest.mark.parametrize("num_pulses", [0, 1, 100])
def test_a_step_that_stops_in_mid_layer_is_found_as_fast_as_one_that_never_began(
    num_pulses: int,
) -> None:
    timer, step = StepTimer(30.0, CostModel()), object()
    timer.is_hung(step, LOAD, timer.tick_seconds)
    for pulse in range(num_pulses):
        timer.felt(step, pulse)
    num_ticks = 0
    while not timer.is_hung(step, LOAD, timer.tick_seconds):
        num_ticks += 1
        timer.felt(step, num_pulses)
    assert num_ticks == pytest.approx(30 / timer.tick_seconds, abs=3)


def test_a_sign_of_life_from_an_earlier_step_does_not_count() -> None:
    timer, earlier, step = StepTimer(30.0, CostModel()), object(), object()
    timer.is_hung(earlier, LOAD, timer.tick_seconds)
    timer.felt(earlier, 1)
    timer.is_hung(step, LOAD, timer.tick_seconds)
    for _ in range(60):
        assert not timer.is_hung(step, LOAD, timer.tick_seconds)
        timer.felt(earlier, 2)
        timer.felt(step, 3)
    assert timer.is_hung(step, LOAD, timer.tick_seconds)


async def reports_of_silent_shards(error: ShardError) -> list[ShardError]:
    """What the detector reports while a step lasts and the shards answer with `error`."""
    step, reports, was_asked = OldestStep(7, object(), LOAD), list[ShardError](), asyncio.Event()
    timer = StepTimer(0.01, CostModel())

    async def pulse() -> int:
        while not timer.is_silent(step.step):
            await asyncio.sleep(0)
        was_asked.set()
        raise error

    detector = HangDetector(
        timer,
        oldest=lambda: step,
        is_idle=lambda: False,
        pulse=pulse,
        report=reports.append,
    )
    watching = asyncio.create_task(detector.run())
    await was_asked.wait()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return reports


async def test_shards_that_are_silent_during_a_step_hang_and_lost_ones_are_left_to_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepTimer, "limit_seconds", lambda self, load: math.inf)
    silent = ShardHung("a shard does not answer")
    assert await reports_of_silent_shards(silent) == [silent]
    assert await reports_of_silent_shards(ShardLost("it is gone")) == []


def test_a_router_that_was_stopped_during_a_call_does_not_take_that_for_silence() -> None:
    timer, step = StepTimer(30.0, CostModel()), object()
    for seconds in (0.5, 3600.0, 0.5):
        timer.is_hung(step, LOAD, seconds)
    assert not timer.is_silent(step)


def test_every_step_has_its_own_time() -> None:
    timer = StepTimer(30.0, CostModel())
    for _ in range(1000):
        step = object()
        for _ in range(10):
            assert not timer.is_hung(step, LOAD, 1.0)


def test_a_router_that_was_stopped_does_not_take_that_for_a_hang() -> None:
    timer, step = StepTimer(30.0, CostModel()), object()
    timer.is_hung(step, LOAD, 0.5)
    assert not timer.is_hung(step, LOAD, 3600.0)
    assert not timer.is_hung(step, LOAD, 0.5)
