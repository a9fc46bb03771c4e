"""What a request was answered with, exactly: token ids, and log probabilities as the float32 values they are."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_FLOAT32 = struct.Struct("<f")


class StreamError(Exception):
    """A stream of events is not one: an index is missing or repeated, or there is no end or more than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished stream, or what came of it before it failed."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Each exactly a float32; NaN where the server had none."""
    text: str | None = None
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: str | None = None
    """Why there is no more of it."""


def answer_from(events: Iterable[Mapping[str, Any]]) -> Answer:
    """Put the events of `/generate_stream` together; an error event ends the answer.

    Raises StreamError unless the indexes are 1, 2, 3, … and the last event alone has the text.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    last: Mapping[str, Any] | None = None
    for event in events:
        if "error" in event:
            return _failed(ids, logprobs, str(event["error"]))
        if last is not None:
            raise StreamError("an event came after the last one")
        try:
            index, token, text = event["index"], event["token"], event["generated_text"]
            id_, logprob = int(token["id"]), as_float32(token["logprob"])
        except (LookupError, TypeError, ValueError) as error:
            raise StreamError(f"event {len(ids) + 1} is none of Millrace's: {error!r}") from error
        if index != len(ids) + 1:
            raise StreamError(f"event {len(ids) + 1} has index {index}")
        ids.append(id_)
        logprobs.append(logprob)
        if text is not None:
            last = event
    if last is None:
        return _failed(ids, logprobs, "the stream ended without its last event")
    details = last["details"] or {}
    return Answer(
        ids=tuple(ids),
        logprobs=tuple(logprobs),
        text=last["generated_text"],
        finish_reason=details.get("finish_reason"),
        cached_tokens=int(details.get("cached_tokens") or 0),
    )


def as_float32(value: float | None) -> float:
    """The float32 that JSON's decimal stands for, NaN for null."""
    if value is None:
        return math.nan
    return float(_FLOAT32.unpack(_FLOAT32.pack(value))[0])


def same_bits(one: float, other: float) -> bool:
    """Whether two float32 values are the same one; 0.0 and -0.0 are not."""
    return _FLOAT32.pack(one) == _FLOAT32.pack(other)


def _failed(ids: list[int], logprobs: list[float], error: str) -> Answer:
    return Answer(ids=tuple(ids), logprobs=tuple(logprobs), error=error)
