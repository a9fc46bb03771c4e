"""Where the frames of one stream go: straight to the socket, as long as the client keeps up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from millrace_router.request.token_stream import TokenSink

MAX_UNREAD_BYTES = 2**16
"""What may wait in a connection's buffer before frames are held back; asyncio's own limit."""
MAX_HELD_BYTES = 2**18
"""What may be held back beside that, for as long as a client is given to read.

A thousand tokens or so, behind whatever the kernel buffers: a hiccup of the network passes unnoticed, and 128 clients
that stop reading at once cost 32 MiB.
"""


class FrameSink(TokenSink[bytes], Protocol):
    """Receives the frames that tokens have become; no method blocks or raises."""

    def end(self, *tail: bytes) -> None:
        """Take the last frames, which belong to no token."""


def nothing() -> None:
    """Close no connection."""


class StreamWriter:
    """Takes frames without ever blocking or raising.

    While it is open, a frame goes to the transport at once: no task has to wake up for it. When the client does not
    keep up, it closes itself, and frames are held back, in order, for whoever called `hold`. A frame that comes when
    more than `MAX_HELD_BYTES` are held back already ends it: the client does not read, and is cut off.
    """

    def __init__(self, cut_off: Callable[[], None] = nothing) -> None:
        """`cut_off` closes the connection; it must not raise."""
        self.ended = False
        self.error: Exception | None = None
        self._cut_off = cut_off
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._chunked = True
        self._held: list[bytes] = []
        self._num_held_bytes = 0
        self._last_sent_at = self._loop.time()
        self._changed = asyncio.Event()

    def token(self, frame: bytes) -> None:
        """Take a frame; after the end it is dropped."""
        if self.ended:
            return
        self._last_sent_at = self._loop.time()
        transport = self._transport
        if transport is None:
            self._changed.set()
            self._hold_back(frame)
        elif transport.is_closing():
            self.fail(ConnectionResetError("the client has gone"))
        else:
            # The framing is done here because aiohttp's `write` takes two coroutines for each frame.
            transport.write(b"%x\r\n%b\r\n" % (len(frame), frame) if self._chunked else frame)
            if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._transport = None
                self._changed.set()

    def _hold_back(self, frame: bytes) -> None:
        """Keep a frame that cannot be written yet; only a frame that follows too many shows a client that is slow."""
        if self._num_held_bytes > MAX_HELD_BYTES:
            self._held.clear()
            self._fall_behind()
        else:
            self._held.append(frame)
            self._num_held_bytes += len(frame)

    def _fall_behind(self) -> None:
        """End, because the client does not read."""
        self.fail(ConnectionResetError("the client does not read"))
        self._cut_off()

    def end(self, *tail: bytes) -> None:
        """No frame will follow these, which belong to no token."""
        for frame in tail:
            self.token(frame)
        if not self.ended:
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """No frame will follow, because of `error`; the first end counts."""
        if not self.ended:
            self.error = error
            self._end()

    def open(self, transport: asyncio.Transport, *, chunked: bool) -> None:
        """Let frames go to `transport`; call it when nothing is held back."""
        self._transport = transport
        self._chunked = chunked

    def hold(self) -> None:
        """Hold frames back from now on."""
        self._transport = None
        self._changed.clear()

    def take(self) -> bytes:
        """Hand out frames held back, from the oldest on; none if none are left."""
        frames = b"".join(self._held)
        self._held.clear()
        self._num_held_bytes = 0
        return frames

    async def news(self, seconds: float) -> bool:
        """Wait until frames are held back or the end is there; False if there were none at all for `seconds`."""
        while not self._changed.is_set():
            left = self._last_sent_at + seconds - self._loop.time()
            if left <= 0:
                self._last_sent_at = self._loop.time()
                return False
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return True
