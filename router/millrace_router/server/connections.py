"""Connections of clients: how many are open, how long one may be silent, and the memory of unfinished requests.

A connection is idle, or receives a head or a body, or waits for its answer. Only an answer costs the server work, and
permits bound those; everything else waits for a client that may never come back, and is bounded here. Where a bound is
reached, the connection goes that has waited longest for its client: a slow client loses, a fast one does not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import chain
from types import MappingProxyType
from typing import Any

import structlog
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from typing_extensions import override

KEEP_ALIVE_SECONDS = 75.0
"""Time that an idle connection stays open; nginx and most load balancers close theirs sooner."""
HEAD_SECONDS = 30.0
"""Time limit for the request line and all headers, from their first byte on."""
MAX_FIELD_BYTES = 1 << 16
"""Largest request line or header."""
MAX_HEAD_BYTES = 1 << 17
"""Most bytes of the request line and all headers together."""
LARGE_HEAD_BYTES = 1 << 14
"""Size of all headers above which a connection is closed after the answer: an idle one keeps its last headers."""
MAX_BYTES = 1 << 28
"""Most memory for requests that are received or wait to be parsed."""
LOG_SECONDS = 60.0
"""Time between two lines of the log about bounds that are reached."""
_LINE_BYTES = 512
_NAME_BYTES = 256
"""For the name of a header, in addition to its value."""
TOO_MANY = "Too many headers received"
"""aiohttp's message for more headers than it takes, which are 128."""
_END_OF_HEAD = b"\0\r\n"
"""Bytes that no head may contain, so that the parser refuses it."""

_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "keepalive_timeout": KEEP_ALIVE_SECONDS,
        "access_log": None,
        "max_line_size": MAX_FIELD_BYTES,
        "max_field_size": MAX_FIELD_BYTES + _NAME_BYTES,
        # `bodies` decompresses, so that invalid data gets an ordinary error response.
        "auto_decompress": False,
    }
)

log = structlog.get_logger(__name__)


class Held:
    """A body in memory, which counts as long as this object lives."""

    __slots__ = ("_connections", "data")

    def __init__(self, data: bytes, connections: Connections) -> None:
        self.data = data
        self._connections = connections
        connections.num_bytes += len(data)

    def __del__(self) -> None:
        self._connections.num_bytes -= len(self.data)


class Connections:
    """All connections of the server, and their bounds."""

    def __init__(
        self,
        *,
        max_open: int,
        max_bytes: int = MAX_BYTES,
        on_closed: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_closed` gets the bound for which a connection is closed: `connections`, `memory` or `time`."""
        self.max_open = max_open
        self.max_bytes = max_bytes
        self.head_seconds = HEAD_SECONDS
        self.num_open = 0
        self.num_bytes = 0
        """Bytes of heads and bodies that are received or wait to be parsed."""
        self.on_idle: Callable[[Connection], None] | None = None
        """Called with each connection that has nothing to do, instead of waiting for its next request."""
        self.none_open = asyncio.Event()
        """Set while no connection is open."""
        self._on_closed = on_closed
        self._idle: dict[Connection, None] = {}
        self._receiving: dict[Connection, None] = {}
        self._logged_at: float | None = None

    def opened(self, connection: Connection) -> None:
        """Count a new connection, and close the one that waits longest if it is one too many."""
        self.num_open += 1
        self.none_open.clear()
        first = next(chain(self._idle, self._receiving), connection)
        self.waits(connection)
        if self.num_open > self.max_open:
            self.cut(first, "connections")

    def lost(self, connection: Connection) -> None:
        self.num_open -= 1
        self.works(connection)
        if not self.num_open:
            self.none_open.set()

    def waits(self, connection: Connection) -> None:
        """Note that the connection has nothing to do from now on."""
        self.works(connection)
        self._idle[connection] = None
        if self.on_idle is not None:
            self.on_idle(connection)

    def leave(self, on_idle: Callable[[Connection], None]) -> None:
        """Call `on_idle` with each connection that has nothing to do, now or later."""
        self.on_idle = on_idle
        if not self.num_open:
            self.none_open.set()
        for connection in tuple(self._idle):
            on_idle(connection)

    def receives(self, connection: Connection, num_bytes: int) -> None:
        """Count bytes of an unfinished head or body; the oldest of those are cut off if all are too large."""
        self._idle.pop(connection, None)
        self._receiving.setdefault(connection)
        connection.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes and self._receiving:
            self.cut(next(iter(self._receiving)), "memory")

    def works(self, connection: Connection) -> None:
        """Note that the connection does not wait for its client."""
        self._idle.pop(connection, None)
        self._receiving.pop(connection, None)
        self.num_bytes -= connection.num_bytes
        connection.num_bytes = 0

    def cut(self, connection: Connection, bound: str) -> None:
        """Cut a connection off that has reached a bound."""
        self.works(connection)
        self._on_closed(bound)
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            log.warning(
                "Connections that wait for their clients are closed",
                bound=bound,
                open=self.num_open,
                max_open=self.max_open,
                bytes=self.num_bytes,
            )
        connection.cut()


IS_ANSWERED: web.RequestKey[bool] = web.RequestKey("is_answered", bool)
"""In requests whose work may outlive their connection: whether this has been answered."""
CONNECTIONS: web.AppKey[Connections] = web.AppKey("connections", Connections)
RefuseHead = Callable[[str, bool], web.Response]
"""Makes the answer to a head that cannot be read, from the path, and whether the head is too large."""


class Connection(web.RequestHandler):
    """A connection that says what it waits for."""

    __slots__ = (
        "_connections",
        "_head_timer",
        "_in_request",
        "_is_long",
        "_line",
        "_may_have_large_head",
        "_refuse",
        "_timeout",
        "num_bytes",
        "was_cut",
    )

    def __init__(self, server: web.Server, connections: Connections, refuse: RefuseHead) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_OPTIONS)
        self.num_bytes = 0
        """Bytes of the head or body that is being received."""
        self.was_cut = False
        """Whether the body that was received had to go."""
        self._connections = connections
        self._refuse = refuse
        self._in_request = False
        self._line = b""
        """The beginning of the head that is being received."""
        self._is_long = False
        self._may_have_large_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._timeout: asyncio.Timeout | None = None

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.opened(self)

    @override
    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        self._connections.lost(self)

    @override
    def data_received(self, data: bytes) -> None:
        if self._in_request:
            super().data_received(data)
            return
        if b"\n" not in self._line:
            self._line += data[:_LINE_BYTES]
        super().data_received(data)
        if self._messages:
            self._in_request = True
            self._may_have_large_head = self.num_bytes + len(data) > LARGE_HEAD_BYTES
            self._stop_timer()
            self._connections.works(self)
        elif data and self.transport is not None:
            self._receive_head(len(data))

    def _receive_head(self, num_bytes: int) -> None:
        if self._head_timer is None:
            self._head_timer = asyncio.get_running_loop().call_later(
                self._connections.head_seconds, self._connections.cut, self, "time"
            )
        self._connections.receives(self, num_bytes)
        if self.num_bytes > MAX_HEAD_BYTES:
            self._is_long = True
            self.data_received(_END_OF_HEAD)

    @property
    def is_idle(self) -> bool:
        """Whether no request has begun."""
        return not (self._in_request or self._line or self._messages)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @asynccontextmanager
    async def receiving(self, seconds: float) -> AsyncIterator[None]:
        """Receive a body; raises TimeoutError after `seconds`, or at once if `was_cut`."""
        self.was_cut = False
        try:
            async with asyncio.timeout(seconds) as self._timeout:
                yield
        finally:
            self._timeout = None
            self._connections.works(self)

    def receive(self, num_bytes: int) -> None:
        """Count bytes of the body that is being received."""
        self._connections.receives(self, num_bytes)

    def cut(self) -> None:
        """Stop the body that is being received, which is answered then, or else close the connection."""
        if self._timeout is not None:
            self.was_cut = True
            self._timeout.reschedule(asyncio.get_running_loop().time())
        elif self.transport is not None:
            self.transport.abort()

    @override
    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self._may_have_large_head and _size_of_head(request) > LARGE_HEAD_BYTES:
            resp.force_close()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            _forget(request, resp)
            if not self._messages and request.content.is_eof():
                self._in_request, self._line = False, b""
                self._connections.waits(self)

    @override
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a head that cannot be read in the form of its route."""
        plain = super().handle_error(request, status, exc, message)
        if status != web.HTTPBadRequest.status_code:
            return plain
        parts = self._line.split(b" ", 2)
        path = parts[1].decode(errors="replace") if len(parts) > 1 else "/"
        is_long = self._is_long or isinstance(exc, LineTooLong) or message == TOO_MANY
        response = self._refuse(path.partition("?")[0], is_long)
        response.force_close()
        return response


def _size_of_head(request: web.BaseRequest) -> int:
    return sum(len(name) + len(value) for name, value in request.raw_headers)


def _forget(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Drop what an idle connection would keep until its next request: prompt, generations and answer."""
    if isinstance(response, web.Response):
        response.body = None
    if IS_ANSWERED in request:
        request[IS_ANSWERED] = True
    else:
        request.clear()


class _Server(web.Server):
    """Makes a `Connection` for each client."""

    def __init__(self, server: web.Server, connections: Connections, refuse: RefuseHead) -> None:
        """Serve what `server` would."""
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=True,
        )
        self._connections_of_clients = connections
        self._refuse = refuse

    @override
    def __call__(self) -> web.RequestHandler:
        return Connection(self, self._connections_of_clients, self._refuse)


class Runner(web.AppRunner):
    """Runs an application over connections with bounds; it cancels handlers whose client has left."""

    def __init__(
        self, app: web.Application, refuse: RefuseHead, *, shutdown_timeout: float
    ) -> None:
        super().__init__(app, shutdown_timeout=shutdown_timeout)
        self._refuse = refuse

    @override
    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self.app[CONNECTIONS], self._refuse)
