"""Server-sent events as TGI frames them: `data: {json}`, a comment when there has been silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from millrace_router.bodies import error_body
from millrace_router.errors import RouterError

KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"


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
        await response.write(beginning)
        async with _kept_alive(response, keep_alive_seconds) as touch:
            try:
                if beginning is KEEP_ALIVE:
                    await response.write(await first)
                async for framed in events:
                    touch()
                    await response.write(framed)
            except RouterError as error:
                await response.write(on_error(error))
        await response.write_eof()
    finally:
        first.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration, RouterError):
            await first
        await events.aclose()
    return response


@asynccontextmanager
async def _kept_alive(
    response: web.StreamResponse, seconds: float
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
                    await response.write(KEEP_ALIVE)
                    touch()

    watcher = asyncio.create_task(watch())
    try:
        yield touch
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
