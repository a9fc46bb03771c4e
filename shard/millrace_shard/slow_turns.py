"""Grammars that take long: one is worked on at a time, and a little at a time while requests are served beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Lock

from millrace_shard.grammar_trial import Trial
from millrace_shard.work_limit import WorkLimit

MAX_SLOW = 4
"""Those that are worked on, or wait for their turn."""
RUN_SECONDS, REST_SECONDS = 0.01, 0.03
"""Idle CPUs alone are no way to leave others alone: whoever wakes may find one taken until the clock's next tick."""


class TooManySlow(Exception):  # noqa: N818
    """So many take long that another has to wait outside."""


class SlowTurns:
    """Safe for any number of threads, each of which has a trial."""

    def __init__(self) -> None:
        self._places = BoundedSemaphore(MAX_SLOW)
        self._turn = Lock()

    def work(self, trial: Trial, limit: WorkLimit, *, is_busy: Callable[[], bool]) -> bool:
        """Let `trial` go on in its turn, with rests while `is_busy`: whether it answers before the limit.

        Raises TooManySlow, and OSError where the trial's process is gone.
        """
        trial.pause()
        with self._taken():
            trial.resume()
            while limit.seconds_left() > 0.0:
                if trial.is_answered(RUN_SECONDS):
                    return True
                if is_busy():
                    trial.pause()
                    time.sleep(REST_SECONDS)
                    trial.resume()
        return False

    @contextmanager
    def _taken(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            raise TooManySlow
        try:
            with self._turn:
                yield
        finally:
            self._places.release()
