"""How far two rounds of answers to the same requests agree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace_launcher.verify.answers import Answer, same_bits
from millrace_launcher.verify.question import Question


@dataclass(frozen=True, slots=True)
class Place:
    """Where two answers part: positions count from 0; past the last token, text or ending differ."""

    request: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was found; requests are named by their place in the round."""

    num_requests: int
    num_tokens: int
    """Tokens compared: those of each request up to the first that differs, that one included."""
    num_different: int = 0
    """Requests of which any bit differs."""
    num_other_tokens: int = 0
    """Requests whose tokens differ; of the others with a difference, only log probabilities do."""
    first_difference: Place | None = None
    """The earliest position, over all requests."""
    largest_gap: float = 0.0
    """Between log probabilities, in nats: over equal tokens, and over the first pair of greedy ones that differ."""
    failures: tuple[str, ...] = ()
    """Requests that were not answered to the end."""

    @property
    def num_equal(self) -> int:
        """Requests without any difference."""
        return self.num_requests - self.num_different


@dataclass(frozen=True, slots=True)
class _Pair:
    """The comparison of one request."""

    num_tokens: int
    difference: int | None
    other_tokens: bool
    gap: float


def compare(
    questions: Sequence[Question], expected: Sequence[Answer], found: Sequence[Answer]
) -> Comparison:
    """Compare answer by answer, bit for bit; all three are in the same order."""
    pairs = [
        _compare(one, other, is_greedy=question.is_greedy)
        for question, one, other in zip(questions, expected, found, strict=True)
    ]
    places = [
        Place(request, pair.difference)
        for request, pair in enumerate(pairs)
        if pair.difference is not None
    ]
    return Comparison(
        num_requests=len(pairs),
        num_tokens=sum(pair.num_tokens for pair in pairs),
        num_different=len(places),
        num_other_tokens=sum(pair.other_tokens for pair in pairs),
        first_difference=min(places, key=lambda place: place.position, default=None),
        largest_gap=max((pair.gap for pair in pairs), default=0.0),
        failures=tuple(
            f"request {request}: {answer.error}"
            for request, answers in enumerate(zip(expected, found, strict=True))
            for answer in answers
            if answer.error is not None
        ),
    )


def merged(comparisons: Sequence[Comparison]) -> Comparison:
    """Several rounds as one; the place of the first difference is that in its own round."""
    places = [c.first_difference for c in comparisons if c.first_difference is not None]
    return Comparison(
        num_requests=sum(c.num_requests for c in comparisons),
        num_tokens=sum(c.num_tokens for c in comparisons),
        num_different=sum(c.num_different for c in comparisons),
        num_other_tokens=sum(c.num_other_tokens for c in comparisons),
        first_difference=min(places, key=lambda place: place.position, default=None),
        largest_gap=max((c.largest_gap for c in comparisons), default=0.0),
        failures=tuple(failure for c in comparisons for failure in c.failures),
    )


def _compare(one: Answer, other: Answer, *, is_greedy: bool) -> _Pair:
    length = min(len(one.ids), len(other.ids))
    alike = next((i for i in range(length) if one.ids[i] != other.ids[i]), length)
    other_tokens = alike < length or len(one.ids) != len(other.ids)
    # Each server holds its own greedy token for the best, so their gap is bounded as that of one token is.
    num_measured = alike + (alike < length and is_greedy)
    gaps = [_gap(one.logprobs[i], other.logprobs[i]) for i in range(num_measured)]
    difference = next(
        (i for i in range(alike) if not same_bits(one.logprobs[i], other.logprobs[i])), None
    )
    if difference is None and (other_tokens or _ends_differ(one, other)):
        difference = alike
    return _Pair(
        num_tokens=alike + (alike < length),
        difference=difference,
        other_tokens=other_tokens,
        gap=max(gaps, default=0.0),
    )


def _gap(one: float, other: float) -> float:
    """Infinite where only one of the two is a number."""
    if same_bits(one, other):
        return 0.0
    gap = abs(one - other)
    return math.inf if math.isnan(gap) else gap


def _ends_differ(one: Answer, other: Answer) -> bool:
    return (one.text, one.finish_reason, one.error) != (
        other.text,
        other.finish_reason,
        other.error,
    )
