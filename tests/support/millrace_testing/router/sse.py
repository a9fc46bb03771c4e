"""Stand-ins for both ends of a stream: a server scripted to the last byte on a real socket, and a connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any]], list[bytes]]
"""Maps a request's body to the pieces of its answer, each written alone."""


def event(index: int, *, last: bool, generated: int | None = None) -> bytes:
    """One well-formed token event; the last carries the end."""
    end = {"finish_reason": "length", "generated_tokens": generated or index, "seed": None}
    value = {
        "index": index,
        "token": {"id": index, "text": " ab", "logprob": -1.0, "special": False},
        "generated_text": " ab" * index if last else None,
        "details": end if last else None,
    }
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def whole_stream(body: dict[str, Any]) -> list[bytes]:
    """The number of events that the body asks for."""
    asked = body["parameters"]["max_new_tokens"]
    return [event(index, last=index == asked) for index in range(1, asked + 1)]


def unchunked(data: bytes) -> bytes:
    """The body that chunks of HTTP/1.1 carry, up to the last chunk if that is there."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        body, end, data = body + data[:length], data[length : length + 2], data[length + 2 :]
        assert end == b"\r\n"
    return body


class FakeTransport:
    """Remembers what was written; the test says what the client has read."""

    def __init__(self) -> None:
        self.written = b""
        self.num_unread = 0
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data
        self.num_unread += len(data)

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.num_unread


class FakeServer:
    """Answers by script; remembers the bodies and how many requests ran at once."""

    def __init__(self, script: Script, *, hold: int = 0) -> None:
        """With `hold`, the server sends no answer until that many requests are in flight."""
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self._running = 0
        self._script = script
        self._hold = hold
        self._enough = asyncio.Event()

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """Write the script's pieces, one `write` each."""
        body = await request.json()
        self.bodies.append(body)
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        if self._running >= self._hold:
            self._enough.set()
        await self._enough.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in self._script(body):
            await response.write(piece)
        self._running -= 1
        await response.write_eof()
        return response


@asynccontextmanager
async def served(fake: FakeServer) -> AsyncIterator[str]:
    """The base URL at which the stand-in listens."""
    application = web.Application()
    application.router.add_post("/generate_stream", fake.generate_stream)
    async with served_application(application) as url:
        yield url


@asynccontextmanager
async def served_application(application: web.Application) -> AsyncIterator[str]:
    """The base URL of an application on a free port of this machine."""
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
