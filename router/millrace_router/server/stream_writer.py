"""Streams on the server's side: frames of a generation's tokens go straight to the socket while the client keeps up."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

from millrace_router.engine.generation import Generation
from millrace_router.request.token_stream import TokenEvent, TokenSink

MAX_UNREAD_BYTES = 2**16
"""Bytes in a connection's buffer above which frames are buffered here; asyncio's own limit."""
MAX_BUFFERED_BYTES = 2**18
"""Bytes of frames that one stream buffers while its client does not read.

That is about a thousand tokens, behind whatever the kernel buffers: a hiccup of the network passes unnoticed, and 128
clients that stop reading at once cost 32 MiB.
"""


class FrameSink(TokenSink[bytes], Protocol):
    """Receives the frames that tokens have become; no method blocks or raises."""

    def end(self, *tail: bytes) -> None:
        """Take the last frames, which belong to no token."""


def noop() -> None:
    """Do nothing."""


class StreamWriter:
    """Takes frames without ever blocking or raising.

    While it is open, a frame goes to the transport at once: no task has to wake up for it. When the client does not
    keep up, the writer closes itself and buffers frames, in order, until they are drained. A frame that comes when
    more than `MAX_BUFFERED_BYTES` are buffered ends the stream, and the client is cut off.
    """

    def __init__(self, cut_off: Callable[[], None] = noop) -> None:
        """`cut_off` closes the connection; it must not raise."""
        self.ended = False
        self.error: Exception | None = None
        self.is_sent = False
        """Whether the connection has taken all frames."""
        self._cut_off = cut_off
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._chunked = True
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self._last_frame_at = self._loop.time()
        self._changed = asyncio.Event()

    def token(self, frame: bytes) -> None:
        """Take a frame; after the end it is dropped."""
        if self.ended:
            return
        self._last_frame_at = self._loop.time()
        transport = self._transport
        if transport is None:
            self._changed.set()
            self._add(frame)
        elif transport.is_closing():
            self.fail(ConnectionResetError("the client has gone"))
        else:
            # The framing is done here because aiohttp's `write` takes two coroutines for each frame.
            transport.write(b"%x\r\n%b\r\n" % (len(frame), frame) if self._chunked else frame)
            if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._transport = None
                self._changed.set()

    def _add(self, frame: bytes) -> None:
        """Buffer a frame; one large frame does not make a client slow, so the next one decides."""
        if self._num_bytes > MAX_BUFFERED_BYTES:
            self._frames.clear()
            self._fall_behind()
        else:
            self._frames.append(frame)
            self._num_bytes += len(frame)

    def _fall_behind(self) -> None:
        """End the stream because the client does not read."""
        self.fail(ConnectionResetError("the client does not read"))
        self._cut_off()

    def end(self, *tail: bytes) -> None:
        """Take the last frames, which belong to no token."""
        for frame in tail:
            self.token(frame)
        if not self.ended:
            self.is_sent = self._transport is not None
            self._end()

    def _end(self) -> None:
        self.ended = True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """End without a further frame, because of `error`; only the first end counts."""
        if not self.ended:
            self.error = error
            self._end()

    def open(self, transport: asyncio.Transport, *, chunked: bool) -> None:
        """Send frames to `transport` from now on; call it when nothing is buffered."""
        self._transport = transport
        self._chunked = chunked

    def buffer(self) -> None:
        """Buffer frames from now on."""
        self._transport = None
        self._changed.clear()

    def drain(self) -> bytes:
        """Return buffered frames, from the oldest on; empty if none are left."""
        frames = b"".join(self._frames)
        self._frames.clear()
        self._num_bytes = 0
        return frames

    async def wait(self, seconds: float) -> bool:
        """Wait for buffered frames or the end; False if no frame at all has come for `seconds`."""
        while not self._changed.is_set():
            left = self._last_frame_at + seconds - self._loop.time()
            if left <= 0:
                self._last_frame_at = self._loop.time()
                return False
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return True


class GenerationStream(ABC):
    """Makes frames of a generation's tokens, once it is connected to the sink that takes them."""

    _sink: FrameSink

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def generations(self) -> Iterator[Generation]:
        """Yield the generations whose tokens it frames, or connects to its sink."""
        yield self._generation

    def connect(self, sink: FrameSink) -> None:
        """Send frames to `sink` from now on; more than one stream may share it."""
        self._sink = sink
        self._generation.connect(self)

    @abstractmethod
    def token(self, event: TokenEvent) -> None:
        """Frame the next token."""

    def fail(self, error: Exception) -> None:
        """End the sink, and with it all streams that share it."""
        self._sink.fail(error)

    def _finish(self, *tail: bytes) -> None:
        """End the sink; further tokens are ignored."""
        self._generation.disconnect()
        self._sink.end(*tail)
