"""The frames of a stream that several connections may read, kept once for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from millrace_router.errors import RouterError
from millrace_router.server.stream_writer import MAX_UNREAD_BYTES, StreamWriter, nothing

MAX_RECORDED_BYTES = 2**23
"""Frames kept of one stream: some 25 000 tokens of a chat. Of a longer one the beginning is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What there is to a stream besides its frames."""

    headers: Mapping[str, str]
    keep_alive_seconds: float
    """Silence after which a comment is sent."""
    may_expire: Callable[[], bool]
    """Whether it may yet fail for having waited too long."""
    on_error: Callable[[RouterError], bytes]
    """Frames an error in mid-stream."""


def _never() -> bool:
    return False


def with_id(index: int, frame: bytes) -> bytes:
    """Name a server-sent event, so that its client can say how far it has read."""
    return b"id: %d\n%b" % (index, frame)


class Recording:
    """Takes a stream's frames as an outlet does, numbers those of tokens from 1, and hands them to every replay.

    Frames that belong to no token have no number: they are sent again to whoever resumes after the last token. An
    error in mid-stream is such a frame; before the first token it is left to the replays to raise.
    """

    def __init__(
        self,
        form: Form,
        render_error: Callable[[Exception], bytes],
        *,
        max_bytes: int = MAX_RECORDED_BYTES,
    ) -> None:
        self.form = form
        self.ended = False
        self.error: Exception | None = None
        """Why there are no frames at all."""
        self.num_tokens = 0
        self.num_bytes = 0
        """Of the frames that are kept."""
        self.first = 0
        """Frames that have been forgotten, which is the position of the first one kept."""
        self._render_error = render_error
        self._max_bytes = max_bytes
        self._frames: list[bytes] = []
        self._replays: set[ResumedStream] = set()
        self._ended = asyncio.Event()

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
        """Take the frames that belong to no token; no other will follow."""
        if self.ended:
            return
        for frame in tail:
            self._add(frame)
        self._finish()

    def fail(self, error: Exception) -> None:
        """No frame will follow, because of `error`; the first end counts."""
        if self.ended:
            return
        if self.num_tokens:
            self.end(self._render_error(error))
        else:
            self.error = error
            self._finish()

    async def wait(self) -> None:
        """Wait for the end."""
        await self._ended.wait()

    def frames_from(self, position: int, max_bytes: int) -> list[bytes]:
        """The next frames from a position that is kept: as many as fit, but one at least if there is one."""
        first = stop = position - self.first
        num_bytes = 0
        while stop < len(self._frames) and num_bytes < max_bytes:
            num_bytes += len(self._frames[stop])
            stop += 1
        return self._frames[first:stop]

    def add_replay(self, replay: ResumedStream) -> None:
        """Hand every frame to come to `replay`."""
        self._replays.add(replay)

    def remove_replay(self, replay: ResumedStream) -> None:
        """Hand it nothing more."""
        self._replays.discard(replay)

    def _add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.num_bytes += len(frame)
        if self.num_bytes > self._max_bytes:
            self._forget()
        for replay in tuple(self._replays):
            replay.token(frame)

    def _forget(self) -> None:
        """Let a quarter go at once, so that it happens seldom; the newest frame stays whatever its size."""
        count = 0
        while self.num_bytes > self._max_bytes * 3 // 4 and count < len(self._frames) - 1:
            self.num_bytes -= len(self._frames[count])
            count += 1
        del self._frames[:count]
        self.first += count

    def _finish(self) -> None:
        self.ended = True
        # What is kept is to hold no prompt alive.
        self.form = replace(self.form, may_expire=_never)
        self._ended.set()
        for replay in tuple(self._replays):
            replay.follow_end()


class ResumedStream(StreamWriter):
    """What one connection reads of a recording, from a position on; it holds no frame itself.

    A client that reads slowly costs nothing for as long as the recording keeps what it has yet to read, and is cut
    off after that.
    """

    def __init__(
        self, recording: Recording, position: int, cut_off: Callable[[], None] = nothing
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
        self._recording.add_replay(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._recording.remove_replay(self)

    def token(self, frame: bytes) -> None:
        """Take the frame that the recording has just taken."""
        if self._transport is not None:
            self._position += 1
        super().token(frame)

    def follow_end(self) -> None:
        """Take note that the recording has ended."""
        if not self.ended:
            self.error = self._recording.error
            self._end()

    def _hold_back(self, _: bytes) -> None:
        if self._position < self._recording.first:
            self._fall_behind()

    def take(self) -> bytes:
        """Hand out the next frames, a buffer full at a time; none after a failure."""
        if self.error is not None:
            return b""
        frames = self._recording.frames_from(self._position, MAX_UNREAD_BYTES)
        self._position += len(frames)
        return b"".join(frames)
