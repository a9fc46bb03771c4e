"""The replacement of a router that serves by a new one, on SIGUSR2; without a lost request, whatever fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, explain, first
from millrace_launcher.processes.process import ManagedProcess
from millrace_launcher.settings.commands import Command
from millrace_launcher.supervision.control import Control

HAND_OVER_SECONDS = 60.0
"""Time for a new router to serve, from its start on; the old one is without shards for a part of it."""
NUM_SOCKETS = 2
"""Between two routers: of the relay, and for connections of clients."""


class Router:
    """One process of the router, its socket to the launcher, and what it has reported."""

    process: ManagedProcess

    def __init__(self, on_event: Callable[[Router, Mapping[str, Any]], None]) -> None:
        """`on_event` gets the events that are not for this object."""
        self.control = Control(self._receive)
        self._on_event = on_event
        self.opened, self.released = asyncio.Event(), asyncio.Event()
        """Set once it needs only the shards; once it has released them."""
        self.listening = asyncio.Event()
        self.relay_form: int | None = None
        """Version of the messages between two routers that this one reads and writes; None until it has reported it."""
        self.has_shards = False
        """Whether it knows that the shards serve."""
        self.is_cut_off = False
        """Whether it has been replaced, and nothing computes its requests now."""
        self.ready_at: float | None = None
        self.has_progressed = False

    @classmethod
    async def start(
        cls,
        command_of: Callable[[int], Command],
        children: Children,
        on_event: Callable[[Router, Mapping[str, Any]], None],
    ) -> Router:
        """Start one; `command_of` has the descriptor of its socket."""
        router = cls(on_event)
        router.process = await children.start(command_of(router.control.theirs.fileno()))
        router.control.theirs.close()
        return router

    def _receive(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"event": "opened", "relay": int(form)}:
                self.relay_form = form
                self.opened.set()
            case {"event": "released"}:
                self.released.set()
            case {"event": "listening"}:
                self.listening.set()
            case _:
                self._on_event(self, event)

    async def died(self) -> None:
        """Return once its process has ended."""
        await self.process.wait()

    async def end(self) -> None:
        """Kill it."""
        self.process.kill()
        await self.process.wait()
        self.control.close()


class HandOver:
    """One replacement of the router `old`, which serves, by `new`, which has been started."""

    def __init__(self, old: Router, new: Router, give_shards: Callable[[Router], None]) -> None:
        """`give_shards` reports to a router that the shards serve."""
        self._old = old
        self._new = new
        self._give_shards = give_shards
        self._has_released = False

    async def run(self, shards_ready: Callable[[], Any]) -> bool:
        """Return whether the new router serves; if not, it has ended, and the old one goes on, if it lives."""
        reason = None
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                reason = await self._take_over(shards_ready)
        except TimeoutError:
            reason = f"the new router does not serve after {HAND_OVER_SECONDS:g} s"
        if reason is None:
            return True
        if self._new.process.exit_code is not None:
            explain(self._new.process, "The new router failed")
        await self._new.end()
        if self._has_released:
            self._old.control.stay()
        log.error("No hand-over: %s. The former router goes on", reason)
        return False

    async def _take_over(self, shards_ready: Callable[[], Any]) -> str | None:
        """Let the new router serve; return why it cannot."""
        old, new = self._old, self._new
        if await first(new.died(), new.opened.wait()) == 0:
            return "the new router cannot start"
        if old.relay_form != new.relay_form:
            return "the two versions cannot relay each other's requests; restart the server"
        log.info("The new router has started, and takes over")
        self._has_released = True
        old.control.release()
        # An old router that dies has released everything, too.
        if await first(new.died(), old.released.wait(), old.died()) == 0:
            return "the new router died before it had the shards"
        if await first(new.died(), shards_ready()) == 0:
            return "the new router died before it had the shards"
        self._give_shards(new)
        if await first(new.died(), new.listening.wait()) == 0:
            return "the new router died while it took the shards over"
        return None


def connect(old: Router, new: Router) -> None:
    """Let `new` compute the requests of `old`, whose clients stay there."""
    with ExitStack() as stack:
        pairs = [
            [stack.enter_context(end) for end in socket.socketpair(type=kind)]
            for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
        ]
        olds, news = zip(*pairs, strict=True)
        new.control.relay(news, is_old=False)
        old.control.relay(olds, is_old=True)
