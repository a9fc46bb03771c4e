"""A stream of text completions: each choice's echo, then a chunk a token, choices interleaved as they come."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from millrace_router.api.completions.answers import CompletionChunks
from millrace_router.api.completions.text import CompletionPiece, CompletionText
from millrace_router.api.openai.answers import ChunkTemplate, Usage
from millrace_router.engine.generation import Generation
from millrace_router.request.events import PromptLogprobs, TokenEvent
from millrace_router.server.sse import DONE, event
from millrace_router.server.stream_writer import Sink


def usage_of(generation: Generation, piece: CompletionPiece, *, sample: int) -> Usage:
    """Token counts of a choice up to `piece`; a prompt is counted with its first sample alone."""
    if sample:
        return Usage(0, piece.num_tokens)
    return Usage(len(generation.valid.input_ids), piece.num_tokens, generation.cached_tokens)


class CompletionStream:
    """Frames all choices; the first failure ends it for all."""

    def __init__(
        self,
        chunks: CompletionChunks,
        choices: Sequence[tuple[Generation, CompletionText]],
        *,
        num_samples: int,
    ) -> None:
        """`num_samples` choices stand together for each prompt, whose tokens are counted once."""
        self._chunks = chunks
        self._choices = choices
        self._num_samples = num_samples
        self._num_open = len(choices)
        self._total = Usage(0, 0)

    def feed(self, sink: Sink) -> None:
        """Send every chunk to `sink` from now on."""
        self._sink = sink
        firsts = self._choices[:: self._num_samples]
        prompts = [_Prompt(is_scored=first.valid.prefill_logprobs) for first, _ in firsts]
        for index, (generation, text) in enumerate(self._choices):
            number, sample = divmod(index, self._num_samples)
            prompt = prompts[number]
            choice = _Choice(index, generation, text, self, self._chunks, prompt, sample=sample)
            generation.listen(choice, prompt.tell)

    def send(self, frame: bytes) -> None:
        """Send a chunk that is framed."""
        self._sink.send(frame)

    def finished(self, usage: Usage) -> None:
        """Take note of the end of one choice; the end of the last one is that of the stream."""
        self._total += usage
        self._num_open -= 1
        if self._num_open:
            return
        if self._chunks.includes_usage:
            total = self._chunks.usage_chunk(self._total)
            self._sink.end(event(orjson.dumps(total)), DONE)
        else:
            self._sink.end(DONE)

    def fail(self, error: Exception) -> None:
        """End the stream for all."""
        self._sink.fail(error)


class _Prompt:
    """What is told of a prompt, by the first of its samples, which others may overtake."""

    def __init__(self, *, is_scored: bool) -> None:
        self.is_known = not is_scored
        self.logprobs: PromptLogprobs | None = None
        self._waiting: list[_Choice] = []

    def tell(self, logprobs: PromptLogprobs) -> None:
        """Take the log probabilities, and let those go on who wait for them."""
        self.is_known, self.logprobs = True, logprobs
        waiting, self._waiting = self._waiting, []
        for choice in waiting:
            try:
                choice.go_on()
            except Exception as error:  # noqa: BLE001
                # The edge of the request, as where a generation hands a token to its reader.
                choice.fail(error)

    def await_by(self, choice: _Choice) -> None:
        """Have `choice` go on once they are there."""
        self._waiting.append(choice)


class _Choice:
    """Reads one generation."""

    def __init__(
        self,
        index: int,
        generation: Generation,
        text: CompletionText,
        stream: CompletionStream,
        chunks: CompletionChunks,
        prompt: _Prompt,
        *,
        sample: int,
    ) -> None:
        self._generation = generation
        self._index = index
        self._sample = sample
        self._text = text
        self._stream = stream
        self._chunks = chunks
        self._frame = ChunkTemplate(lambda text: chunks.text_chunk(index, text), frame=event).fill
        self._prompt = prompt
        self._held: list[TokenEvent] = []
        self._has_begun = False
        self._finished = False
        self._is_plain = False
        """Whether the next token is most likely nothing but text: the way that has to be short."""

    def token(self, token: TokenEvent) -> None:
        if self._is_plain:
            self._take(self._text.push(token))
            return
        if self._finished:
            return
        if not self._prompt.is_known:
            if not self._held:
                self._prompt.await_by(self)
            self._held.append(token)
            return
        if not self._has_begun:
            self._has_begun = True
            # Not before: a failure until here still has a status of its own.
            if (echo := self._text.opening(self._prompt.logprobs)) is not None:
                self._send(echo)
        piece = self._text.push(token)
        self._is_plain = piece.logprobs is None and not self._chunks.tells_usage_always
        self._take(piece)

    def go_on(self) -> None:
        """Take the tokens that came too soon."""
        held, self._held = self._held, []
        for token in held:
            self.token(token)

    def fail(self, error: Exception) -> None:
        if not self._finished:
            self._stream.fail(error)

    def _take(self, piece: CompletionPiece) -> None:
        if self._is_plain and piece.finish_reason is None:
            self._stream.send(self._frame(piece.text))
            return
        self._send(piece)
        if piece.finish_reason is not None:
            self._finished, self._is_plain = True, False
            self._stream.finished(self._usage(piece))

    def _send(self, piece: CompletionPiece) -> None:
        chunk = self._chunks.chunk(self._index, piece, self._usage(piece))
        self._stream.send(event(orjson.dumps(chunk)))

    def _usage(self, piece: CompletionPiece) -> Usage:
        return usage_of(self._generation, piece, sample=self._sample)
