"""Grammars that take long: one is worked on at a time, and a little at a time while requests are served beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock, Semaphore

from millrace_shard.structured_output.grammar_trial import Trial
from millrace_shard.structured_output.work_limit import WorkLimit

FREE_SECONDS = 0.05
"""By the clock; what is done then has had no rest, as most grammars."""
QUICK_SECONDS = 0.25
"""Of work; what takes more waits for its turn."""
NUM_QUICK = 4
"""Those that have worked for less, at a time."""
MAX_SLOW = 4
"""Those that take their turn, or wait for it."""
RUN_SECONDS, REST_SECONDS = 0.01, 0.03
"""Idle CPUs alone are no way to leave others alone: whoever wakes may find one taken until the clock's next tick."""
PATIENCE_SECONDS = 50.0
"""By the clock, rests and waits included: less than a router waits for an answer."""


class TooManySlow(Exception):  # noqa: N818
    """So many take long that another has to wait outside."""


class SlowTurns:
    """Safe for any number of threads, each of which has a trial."""

    def __init__(self) -> None:
        self._quick = Semaphore(NUM_QUICK)
        self._slow = BoundedSemaphore(MAX_SLOW)
        self._turn = Lock()

    def work(self, trial: Trial, limit: WorkLimit, *, is_busy: Callable[[], bool]) -> bool:
        """Let `trial` go on, with rests while `is_busy`: whether it answers before the limit.

        Raises TooManySlow, and OSError where the trial's process is gone.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        trial.pause()
        with _held(self._quick, deadline):
            trial.resume()
            quick = trial.limit(QUICK_SECONDS)
            if trial.is_answered(FREE_SECONDS) or _goes_on(trial, quick, deadline, is_busy):
                return True
            trial.pause()
        if not self._slow.acquire(blocking=False):
            raise TooManySlow("too many grammars that take long are being compiled")
        try:
            with _held(self._turn, deadline):
                trial.resume()
                return _goes_on(trial, limit, deadline, is_busy)
        finally:
            self._slow.release()


def _goes_on(trial: Trial, limit: WorkLimit, deadline: float, is_busy: Callable[[], bool]) -> bool:
    while limit.seconds_left() > 0.0 and time.monotonic() < deadline:
        if trial.is_answered(RUN_SECONDS):
            return True
        if is_busy():
            trial.pause()
            time.sleep(REST_SECONDS)
            trial.resume()
    # It may have answered since it was asked.
    return trial.is_answered(0.0)


@contextmanager
def _held(place: Semaphore | Lock, deadline: float) -> Iterator[None]:
    if not place.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise TooManySlow("other grammars that take long are being compiled")
    try:
        yield
    finally:
        place.release()
