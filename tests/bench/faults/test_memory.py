"""Slopes and windows of a soak, on series whose answers are known."""

from __future__ import annotations

import random

import psutil
import pytest
from bench.faults.memory import Reading, lives, megabytes_per_hour, read
from bench.faults.windows import Windows, drift


def life(pid: int, start: int, end: int, *, base: float, per_hour: float) -> list[Reading]:
    """A reading every ten seconds; sizes in MB."""
    return [
        Reading(at, "shard-0", pid, int(1e6 * (base + per_hour * at / 3600)), 10, 4)
        for at in range(start, end, 10)
    ]


def test_the_slope_of_one_life() -> None:
    readings = life(1, 0, 3600, base=100, per_hour=12)
    assert megabytes_per_hour(readings, after=600, settle=60) == pytest.approx(12, abs=0.01)


def test_lives_of_different_sizes_share_their_slope() -> None:
    readings = [
        *life(1, 0, 1200, base=100, per_hour=3),
        *life(2, 1200, 2400, base=500, per_hour=3),
        *life(3, 2400, 3600, base=50, per_hour=3),
    ]
    random.Random(1).shuffle(readings)
    assert [len(one) for one in lives(readings)] == [120, 120, 120]
    assert megabytes_per_hour(readings, after=0, settle=0) == pytest.approx(3, abs=0.01)


def test_the_beginning_and_the_first_minute_of_each_life_do_not_count() -> None:
    growing = life(1, 0, 600, base=0, per_hour=5000)
    flat = life(1, 600, 3600, base=900, per_hour=0)
    assert megabytes_per_hour(growing + flat, after=600, settle=0) == pytest.approx(0)
    second = life(2, 3600, 3660, base=0, per_hour=9000) + life(2, 3660, 5000, base=900, per_hour=0)
    assert megabytes_per_hour(flat + second, after=600, settle=60) == pytest.approx(0)


def test_too_little_has_no_slope() -> None:
    assert megabytes_per_hour([], after=0, settle=0) is None
    assert megabytes_per_hour(life(1, 0, 20, base=1, per_hour=1), after=15, settle=0) is None


def test_a_process_that_is_gone_is_not_read() -> None:
    ended = psutil.Popen(["true"])
    ended.wait()
    (own,) = read({"launcher": psutil.Process(), "shard-0": ended}, start=0.0)
    assert own.role == "launcher"
    assert own.resident > 1e6
    assert own.num_fds > 0
    assert own.num_threads > 0


def test_windows_take_what_falls_in_them() -> None:
    windows = Windows(300.0)
    windows.at(0.0).first_tokens.extend([0.1, 0.2, 0.3])
    windows.at(299.9).num_answers += 1
    windows.at(300.0).between_tokens.extend([0.01])
    (first_minute, first), (second_minute, second) = windows.rows()
    assert (first_minute, second_minute) == (0.0, 5.0)
    assert [first["answers"], first["TTFT p50, ms"]] == pytest.approx([1, 200])
    assert second["between tokens p50, ms"] == pytest.approx(10)


def test_drift_is_the_last_third_over_the_first() -> None:
    rows = [{"x": value} for value in (10.0, 10.0, 99.0, 99.0, 15.0, 15.0)]
    assert drift(rows, "x") == pytest.approx(1.5)
    assert drift(rows[:2], "x") is None
