"""Server-sent events as TGI frames them: `data: {json}`, a comment when there has been silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from millrace_router.errors import IncompleteGeneration, IncompleteGenerationStream, RouterError
from millrace_router.server.bodies import error_body
from millrace_router.server.generation_stream import GenerationStream
from millrace_router.server.idempotency import Run
from millrace_router.server.recording import Form, Recording
from millrace_router.server.stream_writer import FrameSink, StreamWriter

KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""What every stream says of itself."""
WRITE_SECONDS = 60.0
"""How long a client may leave what it was sent unread."""

log = structlog.get_logger(__name__)


def event(json: bytes) -> bytes:
    """Frame one event; `json` holds no line break."""
    return b"data: %b\n\n" % json


def named_event(name: str, data: bytes) -> bytes:
    """Frame an event that says its name, as OpenAI's responses and Anthropic's messages do; `data` as for `event`."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def error_event(error: RouterError) -> bytes:
    """Frame TGI's error envelope."""
    return event(error_body(error))


RUN: web.RequestKey[Run] = web.RequestKey("run", Run)
"""The run on whose behalf a handler works, if its request carries a key: its streams are recorded, not sent."""


async def respond(
    request: web.Request, streams: Sequence[GenerationStream], form: Form
) -> web.StreamResponse:
    """Send the frames of `streams`, until one of them ends the sink that they share; raises as `send`."""
    run = request.get(RUN)
    if run is None:
        outlet = StreamWriter(partial(cut_off, request))
        _connect(streams, outlet)
        return await send(request, outlet, form)
    on_error = form.on_error
    recording = Recording(form, lambda error: on_error(_of_stream(error)))
    run.record(recording)
    _connect(streams, recording)
    await recording.wait()
    return web.StreamResponse()


def _connect(streams: Sequence[GenerationStream], sink: FrameSink) -> None:
    for stream in streams:
        stream.connect(sink)


async def send(request: web.Request, outlet: StreamWriter, form: Form) -> web.StreamResponse:
    """Send the frames that come into the outlet, until it ends.

    The status line waits for the first frame, so that a request which fails before it gets its true status; after
    `keep_alive_seconds` of silence it is sent all the same, unless the request `may_expire` in the queue: its client
    is to read a 429 in the status. From then on an error becomes the last event.

    Raises:
        RouterError: nothing has been sent yet.
        ConnectionError: the client has gone, or has stopped reading.

    """
    keep_alive_seconds = form.keep_alive_seconds
    while not await outlet.news(keep_alive_seconds) and form.may_expire():
        pass
    beginning = outlet.take()
    if not beginning and outlet.error is not None:
        raise outlet.error
    response = web.StreamResponse(headers={**form.headers, **STREAM_HEADERS})
    writer = await response.prepare(request)
    assert writer is not None
    connection = _Connection(request, response, writer)
    if beginning or not outlet.ended:
        await connection.write(beginning or KEEP_ALIVE)
    await _pump(outlet, connection, keep_alive_seconds)
    if outlet.error is not None:
        await connection.write(form.on_error(_of_stream(outlet.error)))
    await connection.end()
    return response


def cut_off(request: web.Request) -> None:
    """Close the connection without waiting for its client to read."""
    if request.transport is not None:
        request.transport.abort()


async def _pump(outlet: StreamWriter, connection: _Connection, keep_alive_seconds: float) -> None:
    """Stand by until the outlet ends; raises ConnectionError.

    The outlet writes its frames itself. What is left to do here is to wait for a client that reads slowly, while
    the frames pile up in the outlet, and to break the silence.
    """
    while True:
        outlet.hold()
        await connection.drain()
        if held := outlet.take():
            await connection.write(held)
        elif outlet.ended:
            return
        else:
            outlet.open(connection.transport, chunked=connection.is_chunked)
            if not await outlet.news(keep_alive_seconds):
                await connection.write(KEEP_ALIVE)


def _of_stream(error: Exception) -> RouterError:
    """What the error is called once events have been sent; raises ConnectionError."""
    if isinstance(error, ConnectionError):
        raise error
    if isinstance(error, IncompleteGeneration):
        return IncompleteGenerationStream()
    if isinstance(error, RouterError):
        return error
    # The status is out, so that the stream itself has to tell.
    log.error("stream failed", exc_info=error)
    return RouterError("Internal server error")


class _Connection:
    """A response that has been prepared, and a limit to how long its client may not read."""

    def __init__(
        self, request: web.Request, response: web.StreamResponse, writer: AbstractStreamWriter
    ) -> None:
        self._request = request
        self._response = response
        self._writer = writer
        self.is_chunked = request.version >= HttpVersion11

    @property
    def transport(self) -> asyncio.Transport:
        """Where the frames go; raises ConnectionResetError once the client has gone."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has gone")
        return transport

    async def write(self, data: bytes) -> None:
        """Write through aiohttp; raises ConnectionError."""
        await self._bounded(self._response.write(data))

    async def drain(self) -> None:
        """Wait until the client has read most of what it was sent; raises ConnectionError."""
        await self._bounded(self._writer.drain())

    async def end(self) -> None:
        """Write the end of the body; raises ConnectionError."""
        await self._bounded(self._response.write_eof())

    async def _bounded(self, writing: Awaitable[None]) -> None:
        """Wait for what is being written; cut off a client that does not read it."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await writing
        except TimeoutError:
            cut_off(self._request)
            raise ConnectionResetError("the client has stopped reading") from None
