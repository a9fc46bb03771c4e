"""Text completions as plain dictionaries for the JSON writer, in one piece and as a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import orjson

from millrace_router.api.chat.choice import ChoiceDelta, token_ids
from millrace_router.api.chat.stream import ChoiceStream, ChunkTemplate, OpenChoices
from millrace_router.api.openai.completion_text import CompletionDelta, CompletionText, join
from millrace_router.api.openai.protocol import (
    ChunkJson,
    CompletionCompleteJson,
    CompletionFinalJson,
)
from millrace_router.api.openai.render import ResponseMeta, usage_json
from millrace_router.engine.generation import Generation, Usage
from millrace_router.request.limits import Dialect
from millrace_router.request.token_stream import TokenEvent
from millrace_router.server.sse import event as framed

Sample = tuple[Generation, CompletionText]


def completion_choice(
    index: int, deltas: Sequence[CompletionDelta], prompt_ids: Sequence[int] | None = None
) -> CompletionCompleteJson:
    """Render a choice in one piece; with `prompt_ids` also the ids of all tokens."""
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    choice: CompletionCompleteJson = {
        "index": index,
        "text": "".join(delta.text for delta in deltas),
        "logprobs": join(logprobs) if logprobs else None,
        "finish_reason": deltas[-1].finish_reason,
    }
    if prompt_ids is not None:
        choice["token_ids"] = token_ids(deltas)
        choice["prompt_token_ids"] = list(prompt_ids)
    return choice


class CompletionChunks:
    """Renders the events of a stream.

    Usage comes with each choice's last chunk as in TGI, or for all of them in a separate chunk if `includes_usage`,
    and with every chunk, as far as its choice has come, if `continuous_usage`.
    """

    def __init__(
        self,
        meta: ResponseMeta,
        *,
        includes_usage: bool,
        continuous_usage: bool,
        dialect: Dialect,
    ) -> None:
        self.includes_usage = includes_usage
        self.continuous_usage = continuous_usage
        self._meta = meta
        self._no_reason = "" if dialect.has_tgi_reasons else None

    def text_chunk(self, index: int, text: str) -> ChunkJson:
        """Render a chunk with nothing but text."""
        return self._chunk(index, ChoiceDelta(text, None, 0, None))

    def chunk(
        self,
        index: int,
        delta: CompletionDelta,
        usage: Usage,
        prompt_ids: Sequence[int] | None = None,
    ) -> ChunkJson | CompletionFinalJson:
        """Render the chunk of any delta, with `prompt_ids` also the prompt's; `usage` is its choice's so far."""
        chunk = self._chunk(index, delta, prompt_ids)
        is_last = delta.finish_reason is not None and not self.includes_usage
        if not (is_last or self.continuous_usage):
            return chunk
        final: CompletionFinalJson = {**chunk, "usage": usage_json(usage)}
        return final

    def usage_chunk(self, usage: Usage) -> CompletionFinalJson:
        """Render the chunk after the last token."""
        return {**self._meta.json(), "choices": [], "usage": usage_json(usage)}

    def _chunk(
        self, index: int, delta: CompletionDelta, prompt_ids: Sequence[int] | None = None
    ) -> ChunkJson:
        choice: CompletionCompleteJson = {
            "index": index,
            "text": delta.text,
            "logprobs": delta.logprobs,
            "finish_reason": delta.finish_reason or self._no_reason,
        }
        if delta.token_id is not None:
            choice["token_ids"] = [delta.token_id]
        if prompt_ids is not None:
            choice["prompt_token_ids"] = list(prompt_ids)
        return {**self._meta.json(), "choices": [choice]}


class CompletionStream(ChoiceStream):
    """Frames one choice."""

    def __init__(
        self,
        samples: Sequence[Sample],
        sample: int,
        index: int,
        chunks: CompletionChunks,
        choices: OpenChoices,
    ) -> None:
        """`samples` belong to one prompt; the stream is of number `sample`."""
        generation, self._text = samples[sample]
        super().__init__(generation, choices)
        self._first, _ = samples[0]
        self._index = index
        self._chunks = chunks
        self._frame = ChunkTemplate(lambda text: chunks.text_chunk(index, text), frame=framed).fill
        self._followers: Sequence[CompletionStream] = ()
        self._has_begun = False
        self._is_verbatim = False
        self._prompt_ids = generation.valid.input_ids if self._text.has_token_ids else None

    def lead(self, followers: Sequence[CompletionStream]) -> None:
        """Connect `followers` with the first token: their echo needs what is known of the prompt then."""
        self._followers = followers

    def generations(self) -> Iterator[Generation]:
        yield self._generation
        for follower in self._followers:
            yield from follower.generations()

    def token(self, event: TokenEvent) -> None:
        """Frame what the token adds, after the echo if it is the first."""
        token = event.token
        if self._is_verbatim and event.finished is None and not token.special:
            # Nearly every token comes this way.
            self._sink.token(self._frame(token.text))
            return
        if not self._has_begun:
            self._begin()
        delta = self._text.push(event)
        is_plain = delta.logprobs is None and not self._chunks.continuous_usage
        if is_plain and delta.finish_reason is None and delta.token_id is None:
            self._sink.token(self._frame(delta.text))
            return
        self._send(delta)
        if delta.finish_reason is not None:
            self._finish_choice(self._generation.usage(delta.num_tokens))

    def _begin(self) -> None:
        # A failure until the first token still sets the status of the answer.
        self._has_begun = True
        self._is_verbatim = self._text.is_verbatim and not self._chunks.continuous_usage
        opening = self._text.opening(self._first.prompt_logprobs)
        if opening is not None:
            self._send(opening)
        for follower in self._followers:
            follower.connect(self._sink)

    def _send(self, delta: CompletionDelta) -> None:
        usage = self._generation.usage(delta.num_tokens)
        ids, self._prompt_ids = self._prompt_ids, None
        chunk = self._chunks.chunk(self._index, delta, usage, ids)
        self._sink.token(framed(orjson.dumps(chunk)))


def completion_streams(
    samples: Sequence[Sample], num_samples: int, chunks: CompletionChunks
) -> list[CompletionStream]:
    """Make the streams of a request with `num_samples` choices of each prompt; return those to connect."""
    usage_chunk = chunks.usage_chunk if chunks.includes_usage else None
    choices = OpenChoices(len(samples), usage_chunk)
    streams: list[CompletionStream] = []
    for first in range(0, len(samples), num_samples):
        group = samples[first : first + num_samples]
        leader, *followers = (
            CompletionStream(group, sample, first + sample, chunks, choices)
            for sample in range(num_samples)
        )
        streams.append(leader)
        if group[0][0].valid.prefill_logprobs:
            leader.lead(followers)
        else:
            streams.extend(followers)
    return streams
