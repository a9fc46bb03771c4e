"""What another process may do before it is too much."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from millrace_shard.structured_output.work_limit import STRETCH, WorkLimit, cpu_seconds


class Process:
    """Its clock and its CPU time are what the test says."""

    def __init__(self) -> None:
        self.now = 100.0
        self.used: float | None = 7.0

    def limit(self, seconds: float) -> WorkLimit:
        return WorkLimit(seconds, lambda: self.used, lambda: self.now)


def test_work_counts_and_not_the_clock() -> None:
    process = Process()
    limit = process.limit(5.0)
    process.now, process.used = 112.0, 8.0
    assert limit.seconds_left() == 4.0
    process.used = 12.0
    assert limit.seconds_left() == 0.0


def test_the_clock_counts_in_the_end() -> None:
    process = Process()
    limit = process.limit(5.0)
    process.now += 5.0 * STRETCH - 1.0
    assert limit.seconds_left() == 1.0
    process.now += 2.0
    assert limit.seconds_left() < 0.0


def test_what_only_waited_has_not_worked() -> None:
    process = Process()
    limit = process.limit(5.0)
    process.now += 100.0
    assert not limit.is_spent()
    process.used = 12.0
    assert limit.is_spent()
    process.used = None
    assert limit.is_spent()


def test_one_that_has_ended_has_worked_no_more_than_was_seen() -> None:
    process = Process()
    limit = process.limit(5.0)
    process.now, process.used = 120.0, 9.0
    assert limit.seconds_left() == 3.0
    process.used = None
    assert limit.seconds_left() == 3.0
    assert not limit.is_spent()


def test_without_a_cpu_time_the_clock_counts() -> None:
    process = Process()
    process.used = None
    limit = process.limit(5.0)
    process.now += 3.0
    assert limit.seconds_left() == 2.0


def test_cpu_time_is_that_of_the_process() -> None:
    before = cpu_seconds(os.getpid())
    assert before is not None
    assert abs(before - time.process_time()) < 0.5
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        used = cpu_seconds(child.pid)
        assert used is not None
        assert used < before
    assert cpu_seconds(child.pid) is None
