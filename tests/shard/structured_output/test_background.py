from __future__ import annotations

import os
import sys
import time

import pytest

from millrace_shard.structured_output.background import in_background

DEADLINE_SECONDS = 30.0

linux = pytest.mark.skipif(sys.platform != "linux", reason="SCHED_IDLE is Linux's")


def until_it_is_idle() -> int:
    """Returns its policy when it has been changed, or at the deadline."""
    until = time.monotonic() + DEADLINE_SECONDS
    while os.sched_getscheduler(0) != os.SCHED_IDLE and time.monotonic() < until:
        pass
    return os.sched_getscheduler(0)


def test_its_result_and_its_error_are_the_works() -> None:
    assert in_background(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0)


@linux
def test_what_takes_long_goes_behind_all_others_and_what_follows_does_not() -> None:
    before = os.sched_getscheduler(0)
    assert in_background(until_it_is_idle, short_seconds=0.001) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before
    assert in_background(lambda: os.sched_getscheduler(0), short_seconds=60) == before


def test_an_end_of_the_process_in_the_middle_is_passed_on() -> None:
    with pytest.raises(SystemExit):
        in_background(sys.exit)
