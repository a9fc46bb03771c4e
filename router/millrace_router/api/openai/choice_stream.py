"""Streams of several choices: each is a generation of its own, and the last one to end closes the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson

from millrace_router.engine.generation import Generation, Usage
from millrace_router.server.generation_stream import GenerationStream
from millrace_router.server.sse import DONE, event


class OpenChoices:
    """Counts the choices of one stream that have not ended, and adds up their usage."""

    def __init__(
        self,
        count: int,
        usage_chunk: Callable[[Usage], Mapping[str, object]] | None,
        *,
        end: tuple[bytes, ...] = (DONE,),
    ) -> None:
        """`usage_chunk` renders a chunk of its own for the usage of all choices, if there is to be one.

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
