"""The signals that end a supervisor."""

from __future__ import annotations

import asyncio
import signal

from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children


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
