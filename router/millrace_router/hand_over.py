"""The replacement of a router by the next one, without a lost request: what each of the two does.

The launcher starts the next router, which reads its files and waits. Then the old one stops accepting clients and
planning, and releases the shards, the log of keyed requests and what it has learned. The next one takes these,
listens, and computes the requests of the old one, which relays their tokens to its clients. Connections without a
request move to the next router, and the old one ends with its last connection. If the next router fails before it
listens, the old one takes everything back.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial

import structlog
from aiohttp import web

from millrace_router.engine.batcher import Batcher
from millrace_router.engine.relay import Feed, RelayedRequests, Submitted
from millrace_router.errors import GenerationError
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.server.connections import CONNECTIONS, Connection
from millrace_router.server.idempotent_route import KEPT, RUNS
from millrace_router.start.learned import Memory
from millrace_router.start.running import Running

RETRY_SECONDS = 0.05
"""Pause before another connection is passed on, where the kernel holds too many already."""

log = structlog.get_logger(__name__)


class HandOver:
    """Both roles of this router: the next one at first, later perhaps the old one."""

    def __init__(
        self, running: Running, runner: web.AppRunner, listen: Callable[[], Awaitable[web.BaseSite]]
    ) -> None:
        """`listen` begins to accept clients."""
        self.ended = asyncio.Event()
        """Set once another router has everything, and no connection is left."""
        self._batcher: Batcher = running.batcher
        self._launcher: LauncherChannel = running.launcher
        self._memory: Memory = running.memory
        self._infer = running.services.infer
        self._runner = runner
        self._app = runner.app
        self._listen = listen
        self._site: web.BaseSite | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._to_pass: deque[Connection] = deque()
        self._is_relaying = False

    async def begin(self) -> None:
        """Accept clients, and follow the launcher from now on. Raises OSError."""
        self._site = await self._listen()
        self._launcher.on_release = self._release
        self._launcher.on_stay = self._stay
        self._launcher.on_relay = self._relay

    async def close(self) -> None:
        """End all tasks."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _release(self) -> None:
        self._releasing = self._start(self._released())

    async def _released(self) -> None:
        """Stop accepting and planning, and release what the next router takes."""
        if self._site is not None:
            # The launcher keeps the port, so that clients wait in the kernel's queue.
            await self._site.stop()
            self._site = None
        self._batcher.leave()
        await self._batcher.released.wait()
        if (run_log := self._app[KEPT].run_log) is not None:
            run_log.release()
        self._memory.release()
        self._launcher.released()

    def _stay(self) -> None:
        self._start(self._stays())

    async def _stays(self) -> None:
        """Take everything back: the next router has failed."""
        if self._releasing is not None:
            self._releasing.cancel()
            await asyncio.gather(self._releasing, return_exceptions=True)
        if (run_log := self._app[KEPT].run_log) is not None:
            run_log.retake()
        self._memory.retake()
        self._batcher.stay()
        if self._site is None:
            self._site = await self._listen()
        log.warning("The next router has failed, and this one goes on")

    def _relay(self, is_old: bool, sockets: Sequence[socket.socket]) -> None:  # noqa: FBT001
        relay, connections = sockets
        for each in sockets:
            each.settimeout(0)
        if is_old:
            self._start(self._relay_through(relay))
            self._start(self._pass_connections(connections))
        else:
            submit = partial(self._batcher.submit, is_accepted=True)
            requests = RelayedRequests(partial(self._infer.accepted, submit), self._follow)
            self._start(requests.serve(relay))
            self._start(self._take_connections(connections))

    async def _relay_through(self, ours: socket.socket) -> None:
        """Let the next router compute all requests; if it dies, the one after it."""
        if not self._is_relaying:
            self._is_relaying = True
            log.info("Another router serves, and this one ends with its last connection")
            self._start(self._end())
        try:
            await self._batcher.relay().run(ours)
        except Exception:
            log.exception("the relay ends, and begins anew")
        self._launcher.relay_lost()

    async def _end(self) -> None:
        """Wait for the end of all connections and requests, keyed ones without a connection included."""
        await self._app[CONNECTIONS].none_open.wait()
        self._app[RUNS].drain()
        await self._infer.permits.all_free()
        self.ended.set()

    async def _pass_connections(self, channel: socket.socket) -> None:
        """Pass idle connections on until the next router is gone."""
        more = asyncio.Event()

        def add(connection: Connection) -> None:
            self._to_pass.append(connection)
            more.set()

        with channel:
            self._app[CONNECTIONS].leave(add)
            while True:
                while self._to_pass:
                    if not _pass(channel, self._to_pass[0]):
                        await asyncio.sleep(RETRY_SECONDS)
                        continue
                    self._to_pass.popleft()
                more.clear()
                await more.wait()

    async def _take_connections(self, channel: socket.socket) -> None:
        """Serve the connections that the old router passes on."""
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None
        with channel:
            while True:
                readable = asyncio.Event()
                loop.add_reader(channel, readable.set)
                try:
                    await readable.wait()
                finally:
                    loop.remove_reader(channel)
                with suppress(BlockingIOError):
                    data, descriptors, *_ = socket.recv_fds(channel, 1, 1)
                    if not data:
                        return
                    for descriptor in descriptors:
                        taken = socket.socket(fileno=descriptor)
                        await loop.connect_accepted_socket(server, taken)

    def _follow(self, request: Submitted, feed: Feed) -> Callable[[bool], None] | None:
        """Pass on the tokens of a keyed request that this router has taken from the log."""
        run_log = self._app[KEPT].run_log
        recorder = None if run_log is None or request.run is None else run_log.recorder(request.run)
        loan = None if recorder is None else self._app[RUNS].lend(recorder)
        if recorder is None or loan is None:
            return None
        run, give_back = loan

        def on_end() -> None:
            recording = run.recording
            failure = run.failure if recording is None else recording.failure
            feed.fail(failure or GenerationError("the request has ended elsewhere"))

        feed.cached_tokens = partial(recorder.cached_tokens, request.choice)
        stop = recorder.follow(request.choice, len(request.known), feed.followed)
        run.on_end.append(on_end)
        if run.ended:
            on_end()

        def end(is_lost: bool) -> None:  # noqa: FBT001
            stop()
            run.on_end.remove(on_end)
            give_back(is_lost)

        return end


def _pass(channel: socket.socket, connection: Connection) -> bool:
    """Pass a connection on, or close one that cannot be: one with TLS, or whose client has left; False to try again."""
    transport = connection.transport
    if transport is None or not connection.is_idle:
        return True
    plain = transport.get_extra_info("socket")
    if plain is not None and transport.get_extra_info("sslcontext") is None:
        try:
            socket.send_fds(channel, [b"c"], [plain.fileno()])
        except BlockingIOError:
            return False
        except OSError as error:
            log.debug("a connection is closed", why=os.strerror(error.errno or 0))
    transport.abort()
    return True
