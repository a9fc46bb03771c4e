"""Answers of TGI's own routes, as plain dictionaries for the JSON writer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NotRequired

import orjson
from typing_extensions import TypedDict

from millrace_router.request.float32 import shortest
from millrace_router.request.request import FinishReason
from millrace_router.request.token_stream import Finished, PromptLogprobs, Token, TokenEvent
from millrace_router.server.sse import event as framed


class PrefillTokenJson(TypedDict):
    """A prompt token; the first one of a prompt has no log probability."""

    id: int
    text: str
    logprob: float | None


class AlternativeTokenJson(TypedDict):
    """A candidate in the place of a token, in LoRAX's form."""

    id: int
    text: str
    logprob: float | None


class TokenJson(PrefillTokenJson):
    """A generated token."""

    special: bool
    skipped: NotRequired[bool]
    """Only LoRAX has it, and the field below."""
    alternative_tokens: NotRequired[list[AlternativeTokenJson]]


class SequenceJson(TypedDict):
    """The details of any finished sequence."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillTokenJson]
    tokens: list[TokenJson]
    top_tokens: NotRequired[list[list[TokenJson]]]
    cached_tokens: int
    """Not in TGI: tokens of the prompt found in the prefix cache."""
    prompt_tokens: NotRequired[int]
    """Only LoRAX has it, and the field below."""
    skipped_tokens: NotRequired[int]


class BestOfSequenceJson(SequenceJson):
    """A sequence that was not the best."""

    generated_text: str


class BestOfDetailsJson(SequenceJson):
    """`details` of the best one of several sequences."""

    best_of_sequences: list[BestOfSequenceJson]


class GenerateResponse(TypedDict):
    """Answer of `/generate`."""

    generated_text: str
    details: NotRequired[SequenceJson | BestOfDetailsJson]


class StreamDetailsJson(TypedDict):
    """`details` of a stream's last event."""

    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int
    cached_tokens: int
    """Not in TGI."""
    prompt_tokens: NotRequired[int]
    """Only LoRAX has it, and the field below."""
    skipped_tokens: NotRequired[int]


class StreamResponse(TypedDict):
    """One event of a stream; the last one carries the text."""

    index: int
    token: TokenJson
    top_tokens: NotRequired[list[TokenJson]]
    generated_text: str | None
    details: StreamDetailsJson | None


def token_json(token: Token) -> TokenJson:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": shortest(token.logprob),
        "special": token.special,
    }


def prefill_json(prompt: PromptLogprobs | None, texts: Iterable[str]) -> list[PrefillTokenJson]:
    """Render the prompt's log probabilities; empty if they were not requested."""
    if prompt is None:
        return []
    return [
        {"id": id_, "text": text, "logprob": shortest(logprob)}
        for id_, text, logprob in zip(prompt.ids, texts, prompt.logprobs, strict=True)
    ]


def sequence_json(
    tokens: Sequence[TokenEvent],
    finished: Finished,
    *,
    prefill: list[PrefillTokenJson],
    cached_tokens: int,
) -> SequenceJson:
    """Render a finished sequence; `cached_tokens` of its prompt were found in the prefix cache."""
    sequence: SequenceJson = {
        "finish_reason": finished.finish_reason,
        "generated_tokens": finished.generated_tokens,
        "seed": finished.seed,
        "prefill": prefill,
        "tokens": [token_json(event.token) for event in tokens],
        "cached_tokens": cached_tokens,
    }
    if any(event.top_tokens for event in tokens):
        sequence["top_tokens"] = [
            [token_json(token) for token in event.top_tokens] for event in tokens
        ]
    return sequence


_PLAIN_FRAME = framed(
    b'{"index":%d,"token":{"id":%d,"text":%b,"logprob":%b,"special":%b},'
    b'"generated_text":null,"details":null}'
)


def plain_frame(event: TokenEvent) -> bytes:
    """Frame `stream_json` of an event with nothing but its token: the usual case, three times as fast."""
    token = event.token
    return _PLAIN_FRAME % (
        event.index,
        token.id,
        orjson.dumps(token.text),
        orjson.dumps(shortest(token.logprob)),
        b"true" if token.special else b"false",
    )


def stream_json(event: TokenEvent) -> StreamResponse:
    """Render one event of a stream, without its end."""
    if not event.top_tokens:
        return {
            "index": event.index,
            "token": token_json(event.token),
            "generated_text": None,
            "details": None,
        }
    return {
        "index": event.index,
        "token": token_json(event.token),
        "top_tokens": [token_json(token) for token in event.top_tokens],
        "generated_text": None,
        "details": None,
    }
