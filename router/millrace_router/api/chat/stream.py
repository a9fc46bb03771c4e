"""Streams of choices: with events that have names, and with several choices that are interleaved."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping

import orjson

from millrace_router.api.chat.choice import ChatDelta, ChoiceText
from millrace_router.engine.generation import Generation, Usage
from millrace_router.request.token_stream import TokenEvent
from millrace_router.server.sse import DONE, event
from millrace_router.server.stream_writer import GenerationStream


class ChunkTemplate:
    """A chunk that is rendered once, with gaps for the text of each token."""

    def __init__(
        self,
        render: Callable[[str], Mapping[str, object]],
        *,
        frame: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """`frame` adds the framing around the rendered chunk."""
        mark = uuid.uuid4().hex
        framed = frame(orjson.dumps(render(mark)))
        self._parts = framed.split(orjson.dumps(mark))

    def fill(self, text: str) -> bytes:
        return orjson.dumps(text).join(self._parts)


class EventStream(GenerationStream):
    """Frames what each token adds, one frame an event, so that each event has a number to resume after.

    The first token brings the beginning with it: a request that fails before it gets its true status.
    """

    def __init__(self, generation: Generation, text: ChoiceText) -> None:
        super().__init__(generation)
        self._text = text
        self._has_begun = False

    @abstractmethod
    def _begin(self) -> Iterable[bytes]:
        """Frame the events before everything else."""

    @abstractmethod
    def _push(self, delta: ChatDelta) -> Iterable[bytes]:
        """Frame the events of a token that is not the last one."""

    @abstractmethod
    def _end(self, delta: ChatDelta, finish_reason: str) -> Iterable[bytes]:
        """Frame the events of the last token and of the end."""

    def token(self, event: TokenEvent) -> None:
        """Frame what the token adds, which often is nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._send(self._begin())
        delta = self._text.push(event)
        if delta.finish_reason is None:
            self._send(self._push(delta))
        else:
            self._finish(*self._end(delta, delta.finish_reason))

    def _send(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self._sink.token(frame)


class OpenChoices:
    """Counts the choices of one stream that have not ended, and adds up their usage."""

    def __init__(
        self,
        count: int,
        usage_chunk: Callable[[Usage], Mapping[str, object]] | None,
        *,
        end: tuple[bytes, ...] = (DONE,),
    ) -> None:
        """`usage_chunk` renders a separate chunk with the usage of all choices; None for a stream without one.

        `end` are the frames after the last chunk.
        """
        self._count = count
        self._end = end
        self._usage_chunk = usage_chunk
        self._total = Usage()

    def ended(self, usage: Usage) -> tuple[bytes, ...] | None:
        """Count the end of a choice; return the frames that end the stream after the last one."""
        self._total += usage
        self._count -= 1
        if self._count:
            return None
        if self._usage_chunk is None:
            return self._end
        return event(orjson.dumps(self._usage_chunk(self._total))), *self._end


class ChoiceStream(GenerationStream):
    """One choice of a stream, in which choices are interleaved as they come; the first failure ends all."""

    def __init__(self, generation: Generation, choices: OpenChoices) -> None:
        super().__init__(generation)
        self._choices = choices

    def _finish_choice(self, usage: Usage) -> None:
        """End this choice, and the stream if it is the last."""
        tail = self._choices.ended(usage)
        if tail is None:
            self._generation.disconnect()
        else:
            self._finish(*tail)
