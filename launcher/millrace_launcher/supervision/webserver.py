"""Keeps the router serving, and exchanges events with it; the shards keep running during its restart."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from millrace_launcher.banner import url
from millrace_launcher.errors import WebserverCannotStart, WebserverFailed
from millrace_launcher.host.claims import claimed_address
from millrace_launcher.logs import log
from millrace_launcher.processes.children import Children, cancel, explain, first
from millrace_launcher.settings.commands import Command, Commands, Placed
from millrace_launcher.supervision.elsewhere import ClusterShards, RemoteShards
from millrace_launcher.supervision.hand_over import HandOver, Router, connect
from millrace_launcher.supervision.readiness import router_ready
from millrace_launcher.supervision.restarts import Breaker, is_steady
from millrace_launcher.supervision.shard_group import ORDERLY_FAILURES
from millrace_launcher.supervision.shards import Shards
from millrace_proto.listening import refuse_waiting
from millrace_router.config import listen_address

AnyShards = Shards | RemoteShards | ClusterShards
# A router that served for this time before it died is no crash loop.
STEADY_SECONDS = 10.0
SPARE_SECONDS = 10.0
"""Another router is prepared after the first one has served for so long: not in a crash loop or a short run."""


class Spare:
    """A router that has read its files and waits, to serve at once if the one that serves dies.

    It takes the memory of a router, and a second of one core at low priority when it starts.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        """One that starts the process, and one that watches it."""
        self.router: Router | None = None

    def prepare(self, start: Callable[[], Coroutine[Any, Any, Router]]) -> None:
        """Let `start` make one after a while, unless there is one; after an earlier death a start waits anyway."""
        if self._timer is None and not self._tasks:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(SPARE_SECONDS, self._begin, start)

    def _begin(self, start: Callable[[], Coroutine[Any, Any, Router]]) -> None:
        self._timer = None
        self._tasks.append(asyncio.create_task(self._start(start)))

    async def _start(self, start: Callable[[], Coroutine[Any, Any, Router]]) -> None:
        try:
            self.router = await start()
        except OSError as error:
            log.warning("No second router can be started: %s", error)
            return
        self._tasks.append(asyncio.create_task(self._watch(self.router)))

    async def _watch(self, router: Router) -> None:
        if await first(router.died(), router.opened.wait()):
            log.info("A second router waits, to serve if the first one dies")
        await router.died()
        explain(router.process, "The second router died")

    async def take(self) -> Router | None:
        """Return it if it waits; end it if it still starts, since a new one is faster. From now on there is none."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            # It is never cancelled, since it might leave a process behind.
            await self._tasks[0]
        await cancel(self._tasks)
        self._tasks, self._timer = [], None
        router, self.router = self.router, None
        if router is None or (router.process.is_running and router.opened.is_set()):
            return router
        await router.end()
        return None

    async def drop(self) -> None:
        """End it."""
        router = await self.take()
        if router is not None:
            await router.end()


class Webserver:
    """The router over all restarts; each start has its own socket to the launcher.

    The launcher keeps the HTTP port, on which the first router listens once it is ready. From then on clients that
    connect between two routers wait in the kernel's queue. It also keeps two files of memory, where a router leaves
    what it has learned, and its requests with keys.
    """

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
        self._port: socket.socket | None = None
        self._files = memory_files()
        self._router: Router | None = None
        """The one that serves, or starts."""
        self._next: Router | None = None
        """The one that is about to replace it."""
        self._spare = Spare()
        self._former: dict[Router, asyncio.Task[None]] = {}
        """Those that have been replaced and still have clients, with the tasks that wait for their ends."""
        self._shards: AnyShards | None = None
        self._asked = asyncio.Event()
        self._has_served = False
        self._has_given_up = False

    def bind(self) -> None:
        """Take the HTTP port. Raises ArgumentValidation."""
        router = self._commands.settings.router
        self._port = claimed_address(listen_address(router.hostname), router.port)

    async def run(self, folder: Path, shards: AnyShards) -> None:
        """Keep it serving. Raises WebserverCannotStart or WebserverFailed."""
        self._shards = shards
        # It reads its files while the shards load, and what it refuses ends the start at once.
        await shards.started()
        while True:
            life = shards.life
            log.info("Starting Webserver")
            router = self._router = await self._spare.take() or await self._start(folder)
            if await first(router.died(), self._ready(router)):
                self._on_ready(router, folder)
                router = await self._serve(folder)
            self._router = None
            router.control.close()
            await asyncio.sleep(self._died(router, disturbed=shards.life != life))
            await self._shards_back(shards)

    def hand_over(self) -> None:
        """Let a new router, from the code on disk, replace the one that serves."""
        if self._router is None or self._router.ready_at is None:
            log.info("SIGUSR2 received, but no router serves that could be replaced")
        elif self._next is not None:
            log.info("SIGUSR2 received, but the router is being replaced already")
        elif flags := self._without_hand_over():
            log.error("SIGUSR2 received: a router with %s cannot be replaced; restart it", flags)
        else:
            log.info("SIGUSR2 received, replacing the router")
            self._asked.set()

    def _without_hand_over(self) -> str:
        """Return the flags of what only one router at a time can have open."""
        router = self._commands.settings.router
        flags = {"--journal": router.journal, "--kv-events": router.kv_events}
        return " and ".join(flag for flag, value in flags.items() if value is not None)

    def restarting(self, reason: str, *, planned: bool) -> None:
        """Report to the router that the shards go down."""
        for router in self._current():
            router.control.restarting(reason, planned=planned)

    def serving(self) -> None:
        """Report to the router that restarted shards serve."""
        for router in self._current():
            if router.has_shards and self._shards is not None:
                router.control.shards_ready(self._shards.life)

    def moved(self, placed: Placed) -> None:
        """Report to the router where the shards are now."""
        waiting = [] if self._spare.router is None else [self._spare.router]
        for router in (*self._current(), *waiting):
            router.control.moved(placed.addresses)

    def gave_up(self, reason: str) -> None:
        """Report to the router, once, that the shards do not come back."""
        if self._router is not None and not self._has_given_up:
            self._has_given_up = True
            for router in self._current():
                router.control.gave_up(reason)

    def _current(self) -> list[Router]:
        """The routers that need to know of the shards."""
        return [router for router in (self._router, self._next) if router is not None]

    def hang_up(self) -> None:
        """Have the router read its file of API keys again; a router without one would end."""
        has_file = self._commands.settings.router.api_key_file is not None
        for router in (*self._current(), *self._former):
            if has_file and router.ready_at is not None:
                router.process.hang_up()

    async def terminate(self, grace_seconds: float) -> None:
        """End it in an orderly way, or at once if it still waits for the shards.

        The port is the router's from now on, and is closed with it; without a router it is closed at once.
        """
        if self._port is not None:
            self._port.close()
        await self._spare.drop()
        if self._next is not None:
            await self._next.end()
            for router in self._current():
                router.control.stay()
        routers = [*self._former, *([] if self._router is None else [self._router])]
        await asyncio.gather(*(self._terminate(router, grace_seconds) for router in routers))

    async def _terminate(self, router: Router, grace_seconds: float) -> None:
        if router.has_shards:
            await router.process.terminate(grace_seconds)
        await router.end()

    async def _start(self, folder: Path, *, is_successor: bool = False) -> Router:
        placed = self._shards.placed if isinstance(self._shards, ClusterShards) else None
        assert self._port is not None
        descriptors = {"listen_fd": self._port.fileno(), **self._files}

        def command_of(control: int) -> Command:
            inherited = {"supervisor_fd": control, **descriptors}
            return self._commands.router(folder, inherited, placed, is_successor=is_successor)

        return await Router.start(command_of, self._children, self._on_event)

    async def _serve(self, folder: Path) -> Router:
        """Wait for the end of the router that serves, which another one may replace; return it."""
        while True:
            router = self._router
            assert router is not None
            if await first(router.died(), self._asked.wait()) == 0:
                return router
            await self._hand_over(router, folder)
            self._asked.clear()

    async def _hand_over(self, old: Router, folder: Path) -> None:
        assert self._shards is not None
        # It is from the code that is replaced.
        await self._spare.drop()
        self._next = await self._start(folder, is_successor=True)
        if await HandOver(old, self._next, self._give_shards).run(self._shards.ready):
            new = self._router = self._next
            self._on_ready(new, folder)
            if old.process.exit_code is None:
                self._former[old] = asyncio.create_task(self._forget(old))
                connect(old, new)
        else:
            self._prepare_spare(folder)
        self._next = None

    async def _forget(self, former: Router) -> None:
        """Wait for the end of a router that has been replaced."""
        await former.died()
        del self._former[former]
        former.control.close()
        if former.process.exit_code:
            explain(former.process, "A replaced router crashed")

    async def _shards_back(self, shards: AnyShards) -> None:
        """Wait for the shards that a new router needs; after the grace clients are refused until it listens."""
        grace = self._commands.settings.router.recovery_grace
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await shards.ready()
                return
        assert self._port is not None
        refuse_waiting(self._port)
        await shards.ready()

    async def _ready(self, router: Router) -> None:
        """Return once this router answers.

        It waits for the shards to serve, and reports itself that it listens, because another server could answer on its
        port.
        """
        assert self._shards is not None
        await self._shards.ready()
        self._give_shards(router)
        await router.listening.wait()
        if self._commands.settings.router.ssl_ca_certs is None:
            # Clients need a certificate otherwise, and the launcher has none.
            await router_ready(self._base)

    def _give_shards(self, router: Router) -> None:
        assert self._shards is not None
        # During the search for a poison request nothing is kept.
        trusts_kv = not self._shards.breaker.allowance
        router.control.shards_ready(self._shards.life, trusts_kv=trusts_kv)
        router.has_shards = True

    def _prepare_spare(self, folder: Path) -> None:
        if self._commands.settings.launcher.fork_server != "off" and not self._without_hand_over():
            self._spare.prepare(partial(self._start, folder, is_successor=True))

    def _on_ready(self, router: Router, folder: Path) -> None:
        router.ready_at = time.monotonic()
        self._prepare_spare(folder)
        for former in self._former:
            # Those whose next router has died.
            if former.is_cut_off:
                former.is_cut_off = False
                connect(former, router)
        if self._has_served:
            log.info("The router is back")
            return
        self._has_served = True
        self._announce(self._base)

    def _died(self, router: Router, *, disturbed: bool) -> float:
        """The seconds before the next start; raises if there is none."""
        process, was_ready = router.process, router.ready_at is not None
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
        if router.has_progressed or is_steady(router.ready_at, now, enough_seconds=STEADY_SECONDS):
            self._breaker.progressed()
        delay = self._breaker.restart()
        if delay is None:
            raise WebserverFailed if self._has_served else WebserverCannotStart
        log.warning("Restarting the router%s", f" in {delay:g} s" if delay else "")
        return delay

    def _on_event(self, router: Router, event: Mapping[str, Any]) -> None:
        """Handle an event of the router; unknown events are dropped."""
        assert self._shards is not None
        match event:
            case {"event": "progress"}:
                self._shards.breaker.progressed()
                router.has_progressed = router.ready_at is not None
            case {"event": "relay_lost"}:
                self._on_cut_off(router)
            case {"event": "restart", "reason": str(reason)}:
                self._shards.restart(reason)
            case {"event": "suspects", "count": int(count)}:
                self._shards.breaker.suspect(count)
            case _:
                log.debug("The router sent an unknown event: %s", event)

    def _on_cut_off(self, former: Router) -> None:
        """The router that computed the requests of a replaced one is gone: another one goes on."""
        router = self._router
        serves = router is not None and router.ready_at is not None
        former.is_cut_off = True
        if router is not None and serves and router.process.exit_code is None:
            former.is_cut_off = False
            connect(former, router)


def memory_files() -> dict[str, int]:
    """Make the files in memory, by the names of the router's flags for them, where the system has such files.

    Children inherit only those that are named for them.
    """
    if sys.platform != "linux":
        return {}
    return {name: os.memfd_create(f"millrace-{name}") for name in ("state_fd", "run_log_fd")}
