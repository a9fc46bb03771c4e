"""When a dead child is restarted, when restarting ends, and the signals that end it all."""

from __future__ import annotations

import asyncio
import math
import signal
from dataclasses import dataclass

from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0


@dataclass(slots=True)
class Breaker:
    """Counts restarts without progress. Restarts of a poison-request search are counted separately."""

    max_restarts: int
    """Allowed restarts without progress."""
    restarts: int = 0
    """Restarts since the last progress."""
    searches: int = 0
    """Restarts of the poison-request search since the last progress."""
    allowance: int = 0
    """Allowed restarts of the search."""

    def progressed(self) -> None:
        """Reset the counts after progress."""
        self.restarts = self.searches = self.allowance = 0

    def suspect(self, count: int) -> None:
        """Allow restarts for a search among `count` requests: bisection needs two for each halving."""
        if count > 0:
            self.allowance = max(self.allowance, 2 * math.ceil(math.log2(count)) + 4)

    def restart(self, *, was_ready: bool = True) -> float | None:
        """Count a restart and return the seconds to wait before it; None if no more restarts are allowed.

        A child that was not ready was not killed by a request, so its death is not part of a search.
        """
        if was_ready and self.searches < self.allowance:
            self.searches += 1
            return 0.0
        if self.restarts >= self.max_restarts:
            return None
        self.restarts += 1
        return delay_seconds(self.restarts)


def delay_seconds(restarts: int) -> float:
    """The pause before a restart: none before the first, then doubled with each."""
    if restarts <= 1:
        return 0.0
    # The bound keeps the exponent small; the longest delay is reached before.
    return min(FIRST_DELAY_SECONDS * 2.0 ** min(restarts - 2, 16), LONGEST_DELAY_SECONDS)


def is_steady(ready_at: float | None, now: float, *, enough_seconds: float) -> bool:
    """Whether a child that became ready at `ready_at`, if ever, served for `enough_seconds`."""
    return ready_at is not None and now - ready_at >= enough_seconds


class Stop:
    """Set by SIGINT or SIGTERM; a second Ctrl-C kills the children at once."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._event = asyncio.Event()

    def listen(self) -> None:
        """Handle the signals from now on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.receive, number)

    def receive(self, number: signal.Signals) -> None:
        """Begin an orderly end, or kill the children after a second Ctrl-C."""
        if not self._event.is_set():
            log.info("%s received, shutting down", signal.Signals(number).name)
            self._event.set()
        elif number == signal.SIGINT:
            log.warning("interrupted again, ending at once")
            self._children.kill()

    async def wait(self) -> None:
        """Wait for the first signal."""
        await self._event.wait()
