"""Work that is short as a rule, and goes behind everybody else's where it is not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import TypeVar

SHORT_SECONDS = 0.03
"""Beside a forward pass on every core; most grammars compile in less of it."""

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], *, short_seconds: float = SHORT_SECONDS) -> Result:
    """`work()`, by a thread of its own that gets only idle CPUs once it has run for `short_seconds`; raises as `work`.

    A lower priority is not enough: whoever has it still gets slices of milliseconds, and the threads of a forward pass
    wait for each other many times in each of those. From `SCHED_IDLE` there is no way back without privileges, hence a
    thread of its own. Elsewhere than on Linux it keeps its priority.
    """
    done: Future[Result] = Future()
    thread = Thread(target=_run, args=(work, done), name="background", daemon=True)
    thread.start()
    thread.join(short_seconds)
    if sys.platform == "linux" and thread.native_id is not None and not done.done():
        # It may have ended by now, or a sandbox may forbid it.
        with suppress(OSError):
            os.sched_setscheduler(thread.native_id, os.SCHED_IDLE, os.sched_param(0))
    return done.result()


def _run(work: Callable[[], Result], done: Future[Result]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001, the caller's to handle
        done.set_exception(error)
