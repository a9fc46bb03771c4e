"""Server-sent events in TGI's framing: `data: {json}`, and a comment after silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial

import structlog
from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from millrace_router.errors import IncompleteGeneration, IncompleteGenerationStream, RouterError
from millrace_router.request.continuation import Turns
from millrace_router.server.access_log import SENT
from millrace_router.server.bodies import error_body
from millrace_router.server.headers import noted_headers
from millrace_router.server.idempotency import Run
from millrace_router.server.recording import Recording, SseOptions
from millrace_router.server.services import SERVICES, Services
from millrace_router.server.stream_writer import FrameSink, GenerationStream, StreamWriter

KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Headers of every stream."""
WRITE_SECONDS = 60.0
"""Time in which a client must read what it was sent."""

log = structlog.get_logger(__name__)


def event(json: bytes) -> bytes:
    """Frame one event; `json` holds no line break."""
    return b"data: %b\n\n" % json


def named_event(name: str, data: bytes) -> bytes:
    """Frame an event with a name, as in OpenAI's responses and Anthropic's messages; `data` holds no line break."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def error_event(error: RouterError) -> bytes:
    return event(error_body(error))


RUN: web.RequestKey[Run] = web.RequestKey("run", Run)
"""The run of a request with an idempotency key: its streams are recorded, not sent."""


async def respond(
    request: web.Request, streams: Sequence[GenerationStream], options: SseOptions
) -> web.StreamResponse:
    """Send the frames of `streams`, until one of them ends the sink that they share; raises as `send`."""
    run = request.get(RUN)
    if run is None:
        writer = StreamWriter(partial(cut_off, request))
        _connect(streams, writer)
        return await send(request, writer, options)
    options = replace(options, headers={**options.headers, **noted_headers(request)})
    on_error, services = options.on_error, request.app[SERVICES]
    recording = Recording(options, lambda error: on_error(_stream_error(error, services)))
    run.record(recording)
    turns = _turns(streams, () if run.recorded is None else run.recorded.take_order())
    _connect(streams, recording)
    turns.advance()
    await recording.wait()
    return web.StreamResponse()


def _turns(streams: Sequence[GenerationStream], order: Sequence[int]) -> Turns:
    """Return the turns of the tokens that are known already; each stream has at least one choice."""
    if not order:
        return Turns({}, ())
    choices = {
        generation.valid.choice.number: generation
        for stream in streams
        for generation in stream.generations()
        if generation.valid.choice is not None
    }
    return Turns(choices, order if len(choices) > 1 else ())


def _connect(streams: Sequence[GenerationStream], sink: FrameSink) -> None:
    for stream in streams:
        stream.connect(sink)


async def send(
    request: web.Request, writer: StreamWriter, options: SseOptions
) -> web.StreamResponse:
    """Send the frames that the writer takes, until it ends.

    The status line waits for the first frame, so that a request which fails before it gets its true status. After
    `keep_alive_seconds` of silence it is sent all the same, unless the request `may_expire` in the queue, where the
    status must become 429. An error after the status line becomes the last event.

    Raises:
        RouterError: nothing has been sent yet.
        ConnectionError: the client has gone, or has stopped reading.

    """
    keep_alive_seconds = options.keep_alive_seconds
    while not await writer.wait(keep_alive_seconds) and options.may_expire():
        pass
    beginning = writer.drain()
    if not beginning and writer.error is not None:
        raise writer.error
    response = web.StreamResponse(headers={**options.headers, **STREAM_HEADERS})
    payload_writer = await response.prepare(request)
    assert payload_writer is not None
    connection = _Connection(request, response, payload_writer)
    try:
        if beginning or not writer.ended:
            await connection.write(beginning or KEEP_ALIVE)
        await _pump(writer, connection, keep_alive_seconds)
        if writer.error is not None:
            failure = _stream_error(writer.error, request.app[SERVICES])
            await connection.write(options.on_error(failure))
        writer.is_sent = True
        await connection.end()
    finally:
        # Some clients close the connection when they have read the last event.
        if writer.is_sent:
            request[SENT] = response
    return response


PIECE_BYTES = 1 << 18
"""Bytes of a large answer that are written at a time."""


async def send_large(request: web.Request, *parts: bytes) -> web.StreamResponse:
    """Send JSON of any size, which is `parts` one after the other, while other requests are served.

    Raises:
        ConnectionError: the client has gone, or has stopped reading.

    """
    response = web.StreamResponse()
    response.content_type = "application/json"
    response.content_length = sum(map(len, parts))
    writer = await response.prepare(request)
    assert writer is not None
    connection = _Connection(request, response, writer)
    for part in parts:
        for start in range(0, len(part), PIECE_BYTES):
            await connection.write(part[start : start + PIECE_BYTES])
    await connection.end()
    return response


def cut_off(request: web.Request) -> None:
    """Close the connection without waiting for its client to read."""
    if request.transport is not None:
        request.transport.abort()


async def _pump(writer: StreamWriter, connection: _Connection, keep_alive_seconds: float) -> None:
    """Wait until the writer ends; raises ConnectionError.

    The writer sends frames itself. This task waits for a client that reads slowly, while the frames pile up in the
    writer, and sends comments after silence.
    """
    while True:
        writer.buffer()
        await connection.drain()
        if frames := writer.drain():
            await connection.write(frames)
        elif writer.ended:
            return
        else:
            writer.open(connection.transport, chunked=connection.is_chunked)
            if not await writer.wait(keep_alive_seconds):
                await connection.write(KEEP_ALIVE)


def _stream_error(error: Exception, services: Services) -> RouterError:
    """Return the error to send after the first event; raises ConnectionError."""
    if isinstance(error, ConnectionError):
        raise error
    if isinstance(error, IncompleteGeneration):
        return IncompleteGenerationStream()
    if isinstance(error, RouterError):
        return error
    # The status has been sent, so the error can only be an event.
    log.error("stream failed", exc_info=error)
    return services.defect()


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
        """The transport of the connection; raises ConnectionResetError once the client has gone."""
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
        """Wait for a write; cut off a client that does not read."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await writing
        except TimeoutError:
            cut_off(self._request)
            raise ConnectionResetError("the client has stopped reading") from None
