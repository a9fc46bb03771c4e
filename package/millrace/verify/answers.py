"""Exact answers: tokens, and log probabilities as float32 values; made of the events of two routes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

_FLOAT32 = struct.Struct("<f")
TokenId = int | str
"""Text, where the route returns no ids."""
Candidates = tuple[tuple[TokenId, float], ...]
"""Likely tokens at one position with their log probabilities, in the server's order."""


class StreamError(Exception):
    """A stream is not valid: an index is missing or repeated, or it has no end or several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Tokens with log probabilities and candidates."""

    ids: tuple[TokenId, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Exact float32 values; NaN where the server has none."""
    candidates: tuple[Candidates, ...] = ()
    """Candidates of each position, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAnswer(Scored):
    """A finished stream, or its part before a failure."""

    prompt: Scored = Scored()
    """The scored prompt, if requested."""
    text: str | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str | None = None
    """The failure, if any."""


def answer_from(events: Iterable[Mapping[str, Any]]) -> ExactAnswer:
    """Combine the events of `/generate_stream`; an error event ends the answer.

    Raises StreamError unless the indexes are 1, 2, 3, … and only the last event has the text.
    """
    parts: list[Scored] = []
    last: Mapping[str, Any] | None = None
    for event in events:
        if "error" in event:
            return failed(joined(parts), message_of(event["error"]))
        if last is not None:
            raise StreamError("an event came after the last one")
        try:
            index, text = event["index"], event["generated_text"]
            part = _scored(event["token"], event.get("top_tokens", ()))
        except (LookupError, TypeError, ValueError) as error:
            raise StreamError(f"event {len(parts) + 1} is none of Millrace's: {error!r}") from error
        if index != len(parts) + 1:
            raise StreamError(f"event {len(parts) + 1} has index {index}")
        parts.append(part)
        if text is not None:
            last = event
    answer = joined(parts)
    if last is None:
        return failed(answer, "the stream ended without its last event")
    details = last["details"] or {}
    return ExactAnswer(
        ids=answer.ids,
        logprobs=answer.logprobs,
        candidates=answer.candidates,
        text=last["generated_text"],
        finish_reason=details.get("finish_reason"),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )


def failed(answer: Scored, error: str) -> ExactAnswer:
    """A partial answer and its failure."""
    return ExactAnswer(
        ids=answer.ids, logprobs=answer.logprobs, candidates=answer.candidates, error=error
    )


def message_of(error: object) -> str:
    """The message of an error, which OpenAI's routes put into an object."""
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


def joined(parts: Sequence[Scored]) -> Scored:
    return Scored(
        ids=tuple(chain.from_iterable(part.ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        candidates=tuple(chain.from_iterable(part.candidates for part in parts)),
    )


def as_float32(value: float | None) -> float:
    """The float32 value of a JSON number, NaN for null."""
    if value is None:
        return math.nan
    return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])


def same_bits(one: float, other: float) -> bool:
    """Whether two float32 values have the same bits; 0.0 and -0.0 differ."""
    return _FLOAT32.pack(one) == _FLOAT32.pack(other)


def _scored(token: Mapping[str, Any], top_tokens: Iterable[Mapping[str, Any]]) -> Scored:
    id_, logprob = _pair(token)
    return Scored(
        ids=(id_,), logprobs=(logprob,), candidates=(tuple(_pair(top) for top in top_tokens),)
    )


def _pair(token: Mapping[str, Any]) -> tuple[TokenId, float]:
    return int(token["id"]), as_float32(token["logprob"])


def completion_from(chunks: Iterable[Mapping[str, Any]]) -> ExactAnswer:
    """Combine the chunks: first the prompt's, then one for each token; an error chunk ends the answer.

    Raises StreamError unless only the last chunk has a finish reason, and usage has the number of received tokens.
    """
    prompt: Scored | None = None
    parts: list[Scored] = []
    texts: list[str] = []
    reason: str | None = None
    usage: Mapping[str, Any] = {}
    for chunk in chunks:
        if "error" in chunk:
            return failed(joined(parts), message_of(chunk["error"]))
        if reason is not None:
            raise StreamError("a chunk came after the last one")
        try:
            (choice,) = chunk["choices"]
            scored, text = _scored_columns(choice["logprobs"]), choice["text"]
            reason = choice["finish_reason"] or None
            if reason is not None:
                usage = chunk["usage"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise StreamError(f"a chunk is none of Millrace's: {error!r}") from error
        texts.append(text)
        if prompt is None:
            prompt = scored
        else:
            parts.append(scored)
    answer = joined(parts)
    if prompt is None or reason is None:
        return failed(answer, "the stream ended without its last chunk")
    counted = (usage["prompt_tokens"], usage["completion_tokens"])
    if counted != (len(prompt.ids), len(answer.ids)):
        raise StreamError(
            f"{len(prompt.ids)} and {len(answer.ids)} tokens came, usage counts {counted}"
        )
    return ExactAnswer(
        ids=answer.ids,
        logprobs=answer.logprobs,
        candidates=answer.candidates,
        prompt=prompt,
        text="".join(texts),
        finish_reason=reason,
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def _scored_columns(columns: Mapping[str, Any]) -> Scored:
    return Scored(
        ids=tuple(columns["tokens"]),
        logprobs=tuple(map(as_float32, columns["token_logprobs"])),
        candidates=tuple(map(_candidates, columns["top_logprobs"])),
    )


def _candidates(named: Mapping[str, float] | None) -> Candidates:
    """The likeliest tokens in order, then the token itself; none for the prompt's first token."""
    return tuple((name, as_float32(logprob)) for name, logprob in (named or {}).items())
