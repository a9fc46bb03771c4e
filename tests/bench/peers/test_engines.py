"""Engine processes from both sides: the loop in the child, and the pipe to the parent."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from bench.harness.paths import ROOT
from bench.peers.process import SOURCES, EngineError, EngineProcess
from bench.peers.worker import Limits, Request, drive

STOP_SECONDS = 30.0
LIMITS = Limits(max_streams=2, max_tokens=16, kv_tokens=32, threads=1)
REQUESTS = [Request([1, 2], 3), Request([3], 1), Request([4, 5, 6], 2)]


class Steps:
    """A peer that gives each request in flight one token at each step."""

    def __init__(self, surplus: int = 0) -> None:
        self.most_at_once = 0
        self._left: dict[int, int] = {}
        self._surplus = surplus

    def add(self, number: int, request: Request) -> None:
        self._left[number] = request.new_tokens + self._surplus
        self.most_at_once = max(self.most_at_once, len(self._left))

    def step(self) -> Iterable[tuple[int, int, bool]]:
        for number in list(self._left):
            self._left[number] -= 1
            has_ended = self._left[number] == 0
            if has_ended:
                del self._left[number]
            yield number, 1, has_ended


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_the_loop_keeps_its_concurrency_and_stamps_every_token(concurrency: int) -> None:
    steps = Steps()
    moments = drive(steps, REQUESTS, concurrency)
    assert [len(m.arrivals) for m in moments] == [3, 1, 2]
    assert steps.most_at_once == min(concurrency, 3)
    assert all(m.due <= m.arrivals[0] and m.arrivals == sorted(m.arrivals) for m in moments)


def test_another_length_than_asked_for_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="request 0 asked for 3 tokens and got 4"):
        drive(Steps(surplus=1), REQUESTS, 8)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    path = os.pathsep.join(str(ROOT / source) for source in (*SOURCES, "tests/support"))
    process = EngineProcess(
        "fake",
        python=Path(sys.executable),
        module="millrace_testing.fake_bench",
        environment={"PYTHONPATH": path},
        log=tmp_path / "log" / "fake.log",
    )
    yield process
    process.end()


def test_requests_go_out_and_timelines_come_back(engine: EngineProcess, tmp_path: Path) -> None:
    engine.load(tmp_path, LIMITS)
    for _ in range(2):
        timelines = engine.run(REQUESTS, 2)
        assert [len(t.arrivals) for t in timelines] == [3, 1, 2]
        assert all(t.first_token_seconds == pytest.approx(0.5) for t in timelines)


def test_between_calls_it_is_frozen_and_in_the_end_it_is_gone(
    engine: EngineProcess, tmp_path: Path
) -> None:
    engine.load(tmp_path, LIMITS)
    (process,) = engine.processes()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            stopped = thread.submit(os.waitid, os.P_PID, process.pid, os.WSTOPPED)
            try:
                stopped.result(timeout=STOP_SECONDS)
            except TimeoutError:
                process.suspend()
                pytest.fail("it is not frozen")
            assert process.status() == psutil.STATUS_STOPPED
            engine.run(REQUESTS, 1)
    engine.end()
    assert not process.is_running()


def test_a_model_that_does_not_load_is_an_error_with_its_traceback(
    engine: EngineProcess, tmp_path: Path
) -> None:
    with pytest.raises(
        EngineError, match=r"fake ended with 1:[\s\S]*FileNotFoundError: .*1 thread"
    ):
        engine.load(tmp_path / "missing", LIMITS)


def test_an_engine_that_dies_is_an_error_and_stays_one(
    engine: EngineProcess, tmp_path: Path
) -> None:
    engine.load(tmp_path, LIMITS)
    for _ in range(2):
        with pytest.raises(EngineError, match="no thirteen"):
            engine.run([Request([13], 1)], 1)


def test_an_engine_whose_threads_outlive_it_is_ended(
    engine: EngineProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.process.END_SECONDS", 0.1)
    engine.load(tmp_path, LIMITS)
    (process,) = engine.processes()
    with pytest.raises(EngineError, match="no fourteen"):
        engine.run([Request([14], 1)], 1)
    assert not process.is_running()
