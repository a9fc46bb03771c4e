"""Times of steps on a device whose events are reached when the test says so."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
import torch

from millrace_shard.device.stopwatch import DeviceProgress, Event, Stopwatch, new_cuda_event

CUDA = torch.device("cuda", 0)


@dataclass
class FakeEvent:
    """Reached at `milliseconds` on the device; a wait for it takes this long on the host's clock."""

    has_time: bool
    milliseconds: float
    clock: FakeClock
    is_recorded: bool = False
    waits: int = 0

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return self.waits > 0

    def synchronize(self) -> None:
        assert self.is_recorded
        self.waits += 1
        self.clock.now_ns = max(self.clock.now_ns, int(self.milliseconds * 1e6))

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self.has_time
        assert end_event.has_time
        return end_event.milliseconds - self.milliseconds


@dataclass
class FakeClock:
    """The host's clock, and a device that reaches its events at `reached`, in milliseconds of this clock."""

    reached: list[float]
    now_ns: int = 0
    events: list[FakeEvent] = field(default_factory=list)

    def new_event(self, *, enable_timing: bool) -> Event:
        self.events.append(FakeEvent(enable_timing, self.reached[len(self.events)], self))
        return self.events[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock([])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: fake.now_ns)
    return fake


def launched(clock: FakeClock, progress: DeviceProgress, *, by_device: bool = False) -> Stopwatch:
    watch = Stopwatch(CUDA, progress, by_device=by_device, new_event=clock.new_event)
    watch.mark()
    watch.mark()
    return watch


def times(watch: Stopwatch) -> list[int]:
    return [watch.elapsed_ns(1), watch.elapsed_ns(2)]


def test_steps_in_flight_share_no_time(clock: FakeClock) -> None:
    """The second step begins on the device when the first one ends, however early it was launched."""
    clock.reached = [4, 5, 11, 13]
    progress = DeviceProgress()
    clock.now_ns = 1_000_000
    first, second = launched(clock, progress), launched(clock, progress)
    assert not first.is_done()
    first.wait()
    assert first.is_done()
    second.wait()
    assert times(first) == [3_000_000, 4_000_000]
    assert times(second) == [6_000_000, 8_000_000]
    assert second.since_start_ns() == 12_000_000


def test_a_step_after_a_pause_begins_with_its_launch(clock: FakeClock) -> None:
    clock.reached = [2, 3, 12, 13]
    progress = DeviceProgress()
    launched(clock, progress).wait()
    clock.now_ns = 10_000_000
    watch = launched(clock, progress)
    watch.wait()
    assert times(watch) == [2_000_000, 3_000_000]


def test_no_duration_is_negative(clock: FakeClock) -> None:
    """Another thread may wait for a later step first."""
    clock.reached = [2, 3, 5, 6]
    progress = DeviceProgress()
    first, second = launched(clock, progress), launched(clock, progress)
    second.wait()
    first.wait()
    assert min(times(first) + times(second)) >= 0


def test_events_have_a_time_on_request_only(clock: FakeClock) -> None:
    clock.reached = [1, 2]
    launched(clock, DeviceProgress()).wait()
    assert [event.has_time for event in clock.events] == [False, False]
    clock.events, clock.reached = [], [1, 4, 6]
    watch = launched(clock, DeviceProgress(), by_device=True)
    watch.wait()
    assert [event.has_time for event in clock.events] == [True, True, True]
    assert times(watch) == [3_000_000, 5_000_000]


def test_a_step_is_waited_for_once(clock: FakeClock) -> None:
    clock.reached = [1, 2]
    watch = launched(clock, DeviceProgress())
    watch.wait()
    clock.now_ns = 50_000_000
    watch.wait()
    assert times(watch) == [1_000_000, 2_000_000]
    assert [event.waits for event in clock.events] == [1, 1]


def test_on_cpu_marks_are_reached_at_once(clock: FakeClock) -> None:
    watch = Stopwatch(torch.device("cpu"), DeviceProgress())
    clock.now_ns = 3
    watch.mark()
    clock.now_ns = 5
    watch.mark()
    watch.wait()
    assert watch.is_done()
    assert times(watch) == [3, 5]


@pytest.mark.parametrize("enable_timing", [False, True])
def test_no_wait_for_cuda_spins(monkeypatch: pytest.MonkeyPatch, enable_timing: bool) -> None:
    asked: dict[str, bool] = {}
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: asked.update(options))
    new_cuda_event(enable_timing=enable_timing)
    assert asked == {"enable_timing": enable_timing, "blocking": True}
