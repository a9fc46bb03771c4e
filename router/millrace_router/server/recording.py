"""The frames of a stream that several connections may read, kept once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from millrace_router.errors import RouterError
from millrace_router.server.stream_writer import MAX_UNREAD_BYTES, StreamWriter, noop

MAX_RECORDED_BYTES = 2**23
"""Bytes of frames kept of one stream: some 25 000 tokens of a chat. The beginning of a longer one is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SseOptions:
    """Options for sending a stream."""

    headers: Mapping[str, str]
    keep_alive_seconds: float
    """Silence after which a comment is sent."""
    may_expire: Callable[[], bool]
    """Whether the request still waits in the queue, with a limit to how long."""
    on_error: Callable[[RouterError], bytes]
    """Frames an error in mid-stream."""


def _never() -> bool:
    return False


def with_id(index: int, frame: bytes) -> bytes:
    """Add an id to a server-sent event, after which its client may resume."""
    return b"id: %d\n%b" % (index, frame)


class Recording:
    """A sink that keeps a stream's frames, numbers the frames of tokens from 1, and hands them to all resumed streams.

    Frames without a token are not numbered: a client that resumes after the last token gets them again. An
    error in mid-stream is such a frame; before the first token the resumed streams raise it.
    """

    def __init__(
        self,
        options: SseOptions,
        render_error: Callable[[Exception], bytes],
        *,
        max_bytes: int = MAX_RECORDED_BYTES,
    ) -> None:
        self.options = options
        self.ended = False
        self.error: Exception | None = None
        """Why the stream failed before its first frame."""
        self.failure: Exception | None = None
        """Why it failed, before its first frame or later."""
        self.num_tokens = 0
        self.num_bytes = 0
        """Bytes of the frames that are kept."""
        self.first = 0
        """Position of the first frame that is kept: the number of frames dropped."""
        self._render_error = render_error
        self._max_bytes = max_bytes
        self._frames: list[bytes] = []
        self._readers: set[ResumedStream] = set()
        self._ended = asyncio.Event()
        self._grown: asyncio.Event | None = None
        """Set with the next frame, if anything waits for it."""

    @property
    def end_position(self) -> int:
        """Position after the last frame there is."""
        return self.first + len(self._frames)

    def token(self, frame: bytes) -> None:
        """Take the frame of the next token; after the end it is dropped."""
        if not self.ended:
            self.num_tokens += 1
            self._add(with_id(self.num_tokens, frame))

    def end(self, *tail: bytes) -> None:
        """Take the last frames, which belong to no token."""
        if self.ended:
            return
        for frame in tail:
            self._add(frame)
        self._finish()

    def fail(self, error: Exception) -> None:
        """End without a further token, because of `error`; only the first end counts."""
        if self.ended:
            return
        self.failure = error
        if self.num_tokens:
            self.end(self._render_error(error))
        else:
            self.error = error
            self._finish()

    async def reached(self, num_tokens: int) -> None:
        """Wait until there are so many frames of tokens, or the end."""
        while self.num_tokens < num_tokens and not self.ended:
            self._grown = asyncio.Event() if self._grown is None else self._grown
            await self._grown.wait()

    async def wait(self) -> None:
        await self._ended.wait()

    def frames_from(self, position: int, max_bytes: int) -> list[bytes]:
        """Return the next frames from a position that is kept: as many as fit, but at least one if there is one."""
        first = stop = position - self.first
        num_bytes = 0
        while stop < len(self._frames) and num_bytes < max_bytes:
            num_bytes += len(self._frames[stop])
            stop += 1
        return self._frames[first:stop]

    def add_reader(self, reader: ResumedStream) -> None:
        """Hand every further frame to `reader`."""
        self._readers.add(reader)

    def remove_reader(self, reader: ResumedStream) -> None:
        self._readers.discard(reader)

    def _add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.num_bytes += len(frame)
        if self.num_bytes > self._max_bytes:
            self._drop_oldest()
        self._wake()
        for reader in tuple(self._readers):
            reader.token(frame)

    def _wake(self) -> None:
        if self._grown is not None:
            self._grown.set()
            self._grown = None

    def _drop_oldest(self) -> None:
        """Drop a quarter at once, so that it happens seldom; the newest frame stays whatever its size."""
        count = 0
        while self.num_bytes > self._max_bytes * 3 // 4 and count < len(self._frames) - 1:
            self.num_bytes -= len(self._frames[count])
            count += 1
        del self._frames[:count]
        self.first += count

    def _finish(self) -> None:
        self.ended = True
        # The callback refers to the generations, whose prompts must not stay in memory with the recording.
        self.options = replace(self.options, may_expire=_never)
        self._ended.set()
        self._wake()
        for reader in tuple(self._readers):
            reader.follow_end()


class ResumedStream(StreamWriter):
    """Writes a recording to one connection, from a position on; it holds no frame itself.

    A client that reads slowly costs nothing while the recording keeps its next frame, and is cut off after that.
    """

    def __init__(
        self, recording: Recording, position: int, cut_off: Callable[[], None] = noop
    ) -> None:
        """`position` counts the frames that the client has."""
        super().__init__(cut_off)
        self._recording = recording
        self._position = position
        if position < recording.end_position:
            self._changed.set()
        if recording.ended:
            self.follow_end()

    def __enter__(self) -> ResumedStream:
        self._recording.add_reader(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._recording.remove_reader(self)

    def token(self, frame: bytes) -> None:
        """Take the frame that the recording has just taken."""
        if self._transport is not None:
            self._position += 1
        super().token(frame)

    def follow_end(self) -> None:
        if not self.ended:
            self.error = self._recording.error
            self._end()

    def _add(self, _: bytes) -> None:
        if self._position < self._recording.first:
            self._fall_behind()

    def drain(self) -> bytes:
        """Return the next frames, a buffer full at a time; empty after a failure."""
        if self.error is not None:
            return b""
        frames = self._recording.frames_from(self._position, MAX_UNREAD_BYTES)
        self._position += len(frames)
        return b"".join(frames)
