"""Keeps the router serving, and exchanges events with it; the shards keep running during its restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace_launcher.banner import url
from millrace_launcher.errors import WebserverCannotStart, WebserverFailed
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, explain, first
from millrace_launcher.processes.process import ManagedProcess
from millrace_launcher.settings.commands import Commands, Placed
from millrace_launcher.supervision.control import Control
from millrace_launcher.supervision.elsewhere import ClusterShards, RemoteShards
from millrace_launcher.supervision.readiness import router_ready
from millrace_launcher.supervision.restarts import Breaker, is_steady
from millrace_launcher.supervision.shard_group import ORDERLY_FAILURES
from millrace_launcher.supervision.shards import Shards
from millrace_router.config import listen_address

AnyShards = Shards | RemoteShards | ClusterShards
# A router that served for this time before it died is no crash loop.
STEADY_SECONDS = 10.0


class Webserver:
    """The router over all restarts; each start has its own socket to the launcher."""

    def __init__(
        self, commands: Commands, children: Children, announce: Callable[[str], None]
    ) -> None:
        """`announce` is called with the base URL when the router first answers."""
        router = commands.settings.router
        self._commands = commands
        self._children = children
        self._announce = announce
        scheme = "http" if router.ssl_certfile is None else "https"
        self._base = url(listen_address(router.hostname), router.port, scheme=scheme)
        self._breaker = Breaker(commands.settings.launcher.max_restarts)
        self._process: ManagedProcess | None = None
        self._control: Control | None = None
        self._shards: AnyShards | None = None
        self._ready_at: float | None = None
        self._listening = asyncio.Event()
        self._has_progressed = False
        self._has_served = False
        self._has_given_up = False

    async def run(self, folder: Path, shards: AnyShards) -> None:
        """Keep it serving. Raises WebserverCannotStart or WebserverFailed."""
        self._shards = shards
        while True:
            await shards.ready()
            life = shards.life
            process = await self._start(folder)
            if await first(process.wait(), self._ready()):
                self._on_ready()
                await process.wait()
            self._hang_up()
            await asyncio.sleep(self._died(process, disturbed=shards.life != life))

    def restarting(self, reason: str, *, planned: bool) -> None:
        """Report to the router that the shards go down."""
        if self._control is not None:
            self._control.restarting(reason, planned=planned)

    def moved(self, placed: Placed) -> None:
        """Report to the router where the shards are now."""
        if self._control is not None:
            self._control.moved(placed.addresses)

    def gave_up(self, reason: str) -> None:
        """Report to the router, once, that the shards do not come back."""
        if self._control is not None and not self._has_given_up:
            self._has_given_up = True
            self._control.gave_up(reason)

    def hang_up(self) -> None:
        """Have the router read its file of API keys again; a router without one would end."""
        has_file = self._commands.settings.router.api_key_file is not None
        if has_file and self._process is not None and self._ready_at is not None:
            self._process.hang_up()

    async def terminate(self, grace_seconds: float) -> None:
        """End it in an orderly way."""
        if self._process is not None:
            await self._process.terminate(grace_seconds)
        self._hang_up()

    async def _start(self, folder: Path) -> ManagedProcess:
        log.info("Starting Webserver")
        self._ready_at, self._has_progressed = None, False
        self._listening.clear()
        self._control = Control(self._on_event)
        theirs = self._control.theirs
        placed = self._shards.placed if isinstance(self._shards, ClusterShards) else None
        command = self._commands.router(folder, theirs.fileno(), placed)
        self._process = await self._children.start(command)
        theirs.close()
        return self._process

    async def _ready(self) -> None:
        """Return once this router answers.

        It first reports itself that it listens, because another server could answer on its port.
        """
        await self._listening.wait()
        if self._commands.settings.router.ssl_ca_certs is None:
            # Clients need a certificate otherwise, and the launcher has none.
            await router_ready(self._base)

    def _on_ready(self) -> None:
        self._ready_at = time.monotonic()
        if self._has_served:
            log.info("The router is back")
            return
        self._has_served = True
        self._announce(self._base)

    def _died(self, process: ManagedProcess, *, disturbed: bool) -> float:
        """The seconds before the next start; raises if there is none."""
        was_ready = self._ready_at is not None
        has_refused = not was_ready and process.exit_code in ORDERLY_FAILURES
        is_end = has_refused and not disturbed and not self._has_served
        if is_end and process.lines.cause is not None:
            process.lines.drop()
            raise WebserverCannotStart(process.lines.cause)
        explain(process, "Webserver Crashed" if was_ready else "Webserver failed to start")
        if has_refused and disturbed:
            # The router failed without shards; the shards' breaker counts this.
            return 0.0
        if is_end:
            raise WebserverCannotStart
        now = time.monotonic()
        if self._has_progressed or is_steady(self._ready_at, now, enough_seconds=STEADY_SECONDS):
            self._breaker.progressed()
        delay = self._breaker.restart()
        if delay is None:
            raise WebserverFailed if self._has_served else WebserverCannotStart
        log.warning("Restarting the router%s", f" in {delay:g} s" if delay else "")
        return delay

    def _on_event(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the router; unknown events are dropped."""
        assert self._shards is not None
        match event:
            case {"event": "listening"}:
                self._listening.set()
            case {"event": "progress"}:
                self._shards.breaker.progressed()
                self._has_progressed = self._ready_at is not None
            case {"event": "restart", "reason": str(reason)}:
                self._shards.restart(reason)
            case {"event": "suspects", "count": int(count)}:
                self._shards.breaker.suspect(count)
            case _:
                log.debug("The router sent an unknown event: %s", event)

    def _hang_up(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
