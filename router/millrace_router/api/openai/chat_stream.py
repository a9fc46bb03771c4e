"""A stream of a chat's chunks, from one generation or several, each a choice."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from millrace_router.api.openai.answers import ChunkTemplate, Usage
from millrace_router.api.openai.chat_answers import ChatAnswers
from millrace_router.api.openai.choice import ChoiceDelta, ChoiceText
from millrace_router.api.openai.errors import usage_of
from millrace_router.api.openai.protocol import ChatCompletionChunkJson
from millrace_router.engine.generation import Generation
from millrace_router.request.events import TokenEvent
from millrace_router.server.sse import DONE, event
from millrace_router.server.stream_writer import Sink


class ChatStream:
    """Frames chunks, choices interleaved as they come; the first failure ends it for all."""

    def __init__(
        self,
        answers: ChatAnswers,
        choices: Sequence[tuple[Generation, ChoiceText]],
        *,
        is_plain: bool,
        includes_usage: bool,
        tells_usage_always: bool,
    ) -> None:
        """With `is_plain`, a token that does not end its choice is nothing but text.

        With `includes_usage` a chunk of its own follows the last choice; with `tells_usage_always` every token's chunk
        has the usage of its choice so far, in which the prompt is counted with the first choice alone.
        """
        self.answers = answers
        self.is_plain = is_plain and not tells_usage_always
        self._choices = choices
        self._includes_usage = includes_usage
        self._tells_usage_always = tells_usage_always
        self._num_open = len(choices)
        self._total = Usage(0, 0)

    def feed(self, sink: Sink) -> None:
        """Send every chunk to `sink` from now on."""
        self._sink = sink
        for index, (generation, text) in enumerate(self._choices):
            generation.listen(_Choice(index, text, self, sink))

    def send(self, chunk: ChatCompletionChunkJson) -> None:
        """Frame a chunk."""
        self._sink.send(event(orjson.dumps(chunk)))

    def take(self, index: int, piece: ChoiceDelta) -> None:
        """Send whatever a piece holds, and the end after the last one of all choices."""
        usage = usage_of(self._choices[index][0], piece, sample=index)
        told = usage if self._tells_usage_always else None
        for chunk in self.answers.chunks(index, piece, told):
            self.send(chunk)
        if piece.finish_reason is None:
            return
        self._total += usage
        self._num_open -= 1
        if not self._num_open:
            self._end()

    def fail(self, error: Exception) -> None:
        """End the stream for all."""
        self._sink.fail(error)

    def _end(self) -> None:
        if not self._includes_usage:
            self._sink.end(DONE)
        else:
            total = self.answers.usage_chunk(self._total)
            self._sink.end(event(orjson.dumps(total)), DONE)


class _Choice:
    """Reads the tokens of one generation."""

    def __init__(self, index: int, text: ChoiceText, stream: ChatStream, sink: Sink) -> None:
        self._index = index
        self._text = text
        self._stream = stream
        self._send = sink.send
        self._frame = ChunkTemplate(
            lambda text: stream.answers.text_chunk(index, text), frame=event
        ).fill
        self._is_open = False
        self._is_finished = False
        self._is_plain = False
        """Whether the next token is most likely nothing but text: the way that has to be short."""

    def token(self, token: TokenEvent) -> None:
        if self._is_plain:
            piece = self._text.push(token)
            if piece.finish_reason is None:
                self._send(self._frame(piece.text))
                return
        elif self._is_finished:
            return
        else:
            piece = self._text.push(token)
        self._take(piece)

    def fail(self, error: Exception) -> None:
        if not self._is_finished:
            self._stream.fail(error)

    def _take(self, piece: ChoiceDelta) -> None:
        if not self._is_open:
            self._is_open = True
            opening = self._stream.answers.opening(self._index)
            if opening is not None:
                self._stream.send(opening)
        self._is_finished = piece.finish_reason is not None
        self._is_plain = self._stream.is_plain and not self._is_finished
        if self._is_plain:
            self._send(self._frame(piece.text))
        else:
            self._stream.take(self._index, piece)
