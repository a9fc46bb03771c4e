"""Where the frames of one stream go: straight to the socket, as long as the client keeps up."""

from __future__ import annotations

import asyncio

MAX_UNREAD_BYTES = 2**16
"""What may wait in a connection's buffer before frames are held back; asyncio's own limit."""


class Outlet:
    """Takes frames without ever blocking or raising.

    While it is open, a frame goes to the transport at once: no task has to wake up for it. Otherwise frames are held
    back, in order, for whoever called `hold`. It closes itself when the client does not keep up.
    """

    def __init__(self) -> None:
        self.ended = False
        self.error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._chunked = True
        self._held: list[bytes] = []
        self._last_sent_at = self._loop.time()
        self._changed = asyncio.Event()

    def send(self, frame: bytes) -> None:
        """Take a frame; after the end it is dropped."""
        if self.ended:
            return
        self._last_sent_at = self._loop.time()
        transport = self._transport
        if transport is None:
            self._held.append(frame)
            self._changed.set()
        elif transport.is_closing():
            self.fail(ConnectionResetError("the client has gone"))
        else:
            # The framing is done here because aiohttp's `write` takes two coroutines for each frame.
            transport.write(b"%x\r\n%b\r\n" % (len(frame), frame) if self._chunked else frame)
            if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._transport = None
                self._changed.set()

    def end(self) -> None:
        """No frame will follow."""
        self.ended = True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """No frame will follow, because of `error`; the first end counts."""
        if not self.ended:
            self.error = error
            self.end()

    def open(self, transport: asyncio.Transport, *, chunked: bool) -> None:
        """Let frames go to `transport`; call it when nothing is held back."""
        self._transport = transport
        self._chunked = chunked

    def hold(self) -> None:
        """Hold frames back from now on."""
        self._transport = None
        self._changed.clear()

    def take(self) -> bytes:
        """Hand out the frames held back."""
        frames = b"".join(self._held)
        self._held.clear()
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
