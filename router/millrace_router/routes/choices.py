"""A stream of chunks from one generation or several, each a choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import orjson

from millrace_router.api.openai_answers import ChoiceText, ChunkTemplate, Piece, Usage
from millrace_router.events import TokenEvent
from millrace_router.generation import Generation
from millrace_router.outlet import Sink
from millrace_router.routes.openai_edge import usage_of
from millrace_router.sse import DONE, event


class Chunks(Protocol):
    """How a route writes its chunks; each of them is JSON."""

    def chunk(self, index: int, piece: Piece) -> Mapping[str, object]:
        """One token of the choice `index`."""

    def last_chunk(self, index: int, piece: Piece, usage: Usage) -> Mapping[str, object]:
        """The last one."""

    def usage_chunk(self, usage: Usage) -> Mapping[str, object] | None:
        """What follows the last token of all choices, if anything does."""


class Choices:
    """Frames one chunk a token, choices interleaved as they come; the first failure ends it."""

    def __init__(
        self, chunks: Chunks, choices: Sequence[tuple[Generation, ChoiceText]], *, num_samples: int
    ) -> None:
        """`num_samples` choices stand together for each prompt, whose tokens are counted once."""
        self.chunks = chunks
        self._choices = choices
        self._num_samples = num_samples
        self._num_open = len(choices)
        self._total = Usage(0, 0)

    def feed(self, sink: Sink) -> None:
        """Send every chunk to `sink` from now on."""
        self._sink = sink
        for index, (generation, text) in enumerate(self._choices):
            generation.listen(_Choice(index, text, self))

    def send(self, json: bytes) -> None:
        """Frame a chunk."""
        self._sink.send(event(json))

    def finish(self, index: int, piece: Piece) -> None:
        """Send the last piece of one choice, and the end after that of the last choice."""
        generation, _ = self._choices[index]
        usage = usage_of(generation, piece, sample=index % self._num_samples)
        self._total += usage
        self.send(orjson.dumps(self.chunks.last_chunk(index, piece, usage)))
        self._num_open -= 1
        if self._num_open:
            return
        total = self.chunks.usage_chunk(self._total)
        self._sink.end(*([] if total is None else [event(orjson.dumps(total))]), DONE)

    def fail(self, error: Exception) -> None:
        """End the stream for all."""
        self._sink.fail(error)


class _Choice:
    """Reads the tokens of one generation."""

    def __init__(self, index: int, text: ChoiceText, choices: Choices) -> None:
        self._index = index
        self._text = text
        self._choices = choices
        self._template = ChunkTemplate(
            lambda text: choices.chunks.chunk(index, Piece(text, None, 0, None))
        )
        self._finished = False

    def token(self, token: TokenEvent) -> None:
        if self._finished:
            return
        piece = self._text.push(token)
        if piece.finish_reason is not None:
            self._finished = True
            self._choices.finish(self._index, piece)
        elif piece.logprobs is None:
            self._choices.send(self._template.fill(piece.text))
        else:
            self._choices.send(orjson.dumps(self._choices.chunks.chunk(self._index, piece)))

    def fail(self, error: Exception) -> None:
        if not self._finished:
            self._choices.fail(error)
