"""Server-sent events as TGI frames them: `data: {json}`, a comment when there has been silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial

import structlog
from aiohttp import web

from millrace_router.bodies import error_body
from millrace_router.errors import IncompleteGeneration, IncompleteGenerationStream, RouterError

KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
WRITE_SECONDS = 60.0
"""How long a client may leave what it was sent unread."""

log = structlog.get_logger(__name__)


def event(json: bytes) -> bytes:
    """Frame one event; `json` holds no line break."""
    return b"data: %b\n\n" % json


def error_event(error: RouterError) -> bytes:
    """Frame TGI's error envelope."""
    return event(error_body(error))


async def respond(
    request: web.Request,
    events: AsyncGenerator[bytes, None],
    *,
    headers: Mapping[str, str],
    keep_alive_seconds: float,
    on_error: Callable[[RouterError], bytes] = error_event,
) -> web.StreamResponse:
    """Send framed events as they come.

    The status line waits for the first event, so that a request which fails before it gets its true status; after
    `keep_alive_seconds` of silence it is sent all the same. From then on an error becomes the last event.

    Raises:
        RouterError: nothing has been sent yet.
        ConnectionError: the client has gone, or has stopped reading.

    """
    response = web.StreamResponse(
        headers={
            **headers,
            "content-type": "text/event-stream",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
    )
    first = asyncio.ensure_future(anext(events, b""))
    try:
        await asyncio.wait({first}, timeout=keep_alive_seconds)
        beginning = first.result() if first.done() else KEEP_ALIVE
        await response.prepare(request)
        write = partial(_write, request, response)
        await write(beginning)
        async with _kept_alive(write, keep_alive_seconds) as touch:
            try:
                if beginning is KEEP_ALIVE:
                    await write(await first)
                async for framed in events:
                    touch()
                    await write(framed)
            except RouterError as error:
                await write(on_error(_of_stream(error)))
            except ConnectionError:
                raise
            except Exception:
                # The edge of the process; the status is out, so that the stream itself has to tell.
                log.exception("stream failed")
                await write(on_error(RouterError("Internal server error")))
        await _bounded(request, response.write_eof())
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
    return response


def _of_stream(error: RouterError) -> RouterError:
    """What the error is called once events have been sent."""
    return IncompleteGenerationStream() if isinstance(error, IncompleteGeneration) else error


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    await _bounded(request, response.write(data))


async def _bounded(request: web.Request, writing: Awaitable[None]) -> None:
    """Wait for what is being written; cut off a client that does not read it. Raises ConnectionError."""
    try:
        async with asyncio.timeout(WRITE_SECONDS):
            await writing
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client has stopped reading") from None


@asynccontextmanager
async def _kept_alive(
    write: Callable[[bytes], Awaitable[None]], seconds: float
) -> AsyncIterator[Callable[[], None]]:
    """Send a comment whenever the yielded function has not been called for `seconds`."""
    loop = asyncio.get_running_loop()
    last = loop.time()

    def touch() -> None:
        nonlocal last
        last = loop.time()

    async def watch() -> None:
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(last + seconds - loop.time())
                if loop.time() >= last + seconds:
                    await write(KEEP_ALIVE)
                    touch()

    watcher = asyncio.create_task(watch())
    try:
        yield touch
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
