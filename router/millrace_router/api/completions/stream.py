"""A choice of a text completion as a stream: its echo, then a chunk for each token."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from millrace_router.api.completions.answers import CompletionChunks
from millrace_router.api.completions.text import CompletionDelta, CompletionText
from millrace_router.api.openai.answers import ChunkTemplate
from millrace_router.api.openai.choice_stream import ChoiceStream, OpenChoices
from millrace_router.engine.generation import Generation
from millrace_router.request.events import TokenEvent
from millrace_router.server.sse import event as framed

Sample = tuple[Generation, CompletionText]


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
        """`samples` are those of one prompt; the stream is of number `sample`."""
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
        # A failure until the first token still has a status of its own.
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
