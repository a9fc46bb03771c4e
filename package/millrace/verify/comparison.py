"""Compares two rounds of answers, and judges the comparison by what was promised."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from millrace.verify.answers import Candidates, ExactAnswer, Scored, same_bits
from millrace.verify.questions import Question


@dataclass(frozen=True, slots=True)
class Place:
    """The first difference of two answers. Positions count from 0; past the last token, text or ending differ."""

    request: int
    position: int
    in_prompt: bool = False
    """Whether the position is in the prompt, which precedes the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison; requests are numbered by their place in the round."""

    num_requests: int
    num_tokens: int
    """Compared tokens: each request's tokens up to and including the first that differs."""
    num_different: int = 0
    """Requests with any different bit."""
    num_other_tokens: int = 0
    """Requests with different tokens. The other differences are in log probabilities or candidates."""
    first_difference: Place | None = None
    """The earliest position over all requests."""
    largest_gap: float = 0.0
    """The largest difference of log probabilities, in nats, of equal tokens and of the first different greedy tokens.

    It includes common candidates at these positions, and the prompt where it was scored.
    """
    failures: tuple[str, ...] = ()
    """Requests without a complete answer."""

    @property
    def num_equal(self) -> int:
        return self.num_requests - self.num_different


@dataclass(frozen=True, slots=True)
class _Pair:
    """The comparison of one answer or of one prompt."""

    num_tokens: int
    difference: int | None
    other_tokens: bool
    gap: float


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The comparisons of one request."""

    prompt: _Pair
    answer: _Pair

    def difference(self, request: int) -> Place | None:
        if self.prompt.difference is not None:
            return Place(request, self.prompt.difference, in_prompt=True)
        if self.answer.difference is not None:
            return Place(request, self.answer.difference)
        return None


def compare(
    questions: Sequence[Question], expected: Sequence[ExactAnswer], found: Sequence[ExactAnswer]
) -> Comparison:
    """Compare answers bit for bit; all three sequences have the same order."""
    pairs = [
        _compare(one, other, is_greedy=question.is_greedy)
        for question, one, other in zip(questions, expected, found, strict=True)
    ]
    places = [
        place
        for request, pair in enumerate(pairs)
        if (place := pair.difference(request)) is not None
    ]
    return Comparison(
        num_requests=len(pairs),
        num_tokens=sum(pair.answer.num_tokens for pair in pairs),
        num_different=len(places),
        num_other_tokens=sum(pair.answer.other_tokens for pair in pairs),
        first_difference=_earliest(places),
        largest_gap=max((max(pair.prompt.gap, pair.answer.gap) for pair in pairs), default=0.0),
        failures=tuple(
            f"request {request}: {answer.error}"
            for request, answers in enumerate(zip(expected, found, strict=True))
            for answer in answers
            if answer.error is not None
        ),
    )


def merged(comparisons: Sequence[Comparison]) -> Comparison:
    """Several rounds as one; the first difference has its place in its own round."""
    places = [c.first_difference for c in comparisons if c.first_difference is not None]
    return Comparison(
        num_requests=sum(c.num_requests for c in comparisons),
        num_tokens=sum(c.num_tokens for c in comparisons),
        num_different=sum(c.num_different for c in comparisons),
        num_other_tokens=sum(c.num_other_tokens for c in comparisons),
        first_difference=_earliest(places),
        largest_gap=max((c.largest_gap for c in comparisons), default=0.0),
        failures=tuple(failure for c in comparisons for failure in c.failures),
    )


def _earliest(places: Sequence[Place]) -> Place | None:
    return min(places, key=lambda place: (not place.in_prompt, place.position), default=None)


def _compare(one: ExactAnswer, other: ExactAnswer, *, is_greedy: bool) -> _Pairs:
    prompt = _compare_scored(one.prompt, other.prompt, is_greedy=False)
    if prompt.other_tokens:
        # The prompts are equal, so one without scores is not close to one with scores.
        prompt = replace(prompt, gap=math.inf)
    answer = _compare_scored(one, other, is_greedy=is_greedy)
    if answer.difference is None and _ends_differ(one, other):
        answer = replace(answer, difference=len(one.ids))
    return _Pairs(prompt, answer)


def _compare_scored(one: Scored, other: Scored, *, is_greedy: bool) -> _Pair:
    length = min(len(one.ids), len(other.ids))
    alike = next((i for i in range(length) if one.ids[i] != other.ids[i]), length)
    other_tokens = alike < length or len(one.ids) != len(other.ids)
    # Each server chose its own best token, so the gap of the two is bounded like the gap of one token.
    num_measured = alike + (alike < length and is_greedy)
    gaps = [_gap_at(one, other, i) for i in range(num_measured)]
    difference = next((i for i in range(alike) if not _same_at(one, other, i)), None)
    if difference is None and other_tokens:
        difference = alike
    return _Pair(
        num_tokens=alike + (alike < length),
        difference=difference,
        other_tokens=other_tokens,
        gap=max(gaps, default=0.0),
    )


def _same_at(one: Scored, other: Scored, position: int) -> bool:
    mine, others = _candidates_at(one, position), _candidates_at(other, position)
    return (
        same_bits(one.logprobs[position], other.logprobs[position])
        and [id_ for id_, _ in mine] == [id_ for id_, _ in others]
        and all(same_bits(a, b) for (_, a), (_, b) in zip(mine, others, strict=True))
    )


def _gap_at(one: Scored, other: Scored, position: int) -> float:
    """The gap of the token and of common candidates; infinite if only one answer has candidates."""
    gap = _gap(one.logprobs[position], other.logprobs[position])
    mine, others = dict(_candidates_at(one, position)), dict(_candidates_at(other, position))
    if bool(mine) != bool(others):
        return math.inf
    return max([gap, *(_gap(mine[id_], others[id_]) for id_ in mine.keys() & others.keys())])


def _candidates_at(scored: Scored, position: int) -> Candidates:
    return scored.candidates[position] if scored.candidates else ()


def _gap(one: float, other: float) -> float:
    """The difference of two log probabilities; infinite if only one is a number."""
    if same_bits(one, other):
        return 0.0
    gap = abs(one - other)
    return math.inf if math.isnan(gap) else gap


def _ends_differ(one: ExactAnswer, other: ExactAnswer) -> bool:
    return (one.text, one.finish_reason, one.error) != (
        other.text,
        other.finish_reason,
        other.error,
    )


REFERENCE_TOLERANCE = 1e-3
"""Nats between float32 log probabilities of different implementations."""
TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
"""Nats between log probabilities that differ in the order of sums alone, by the model's dtype."""


class Verdict(Enum):
    """The result of a case."""

    EQUAL = "equal"
    CLOSE = "within tolerance"
    BROKEN = "BROKEN"
    NOT_EXERCISED = "NOT EXERCISED"
    NOT_CHECKED = "not checked"

    @property
    def is_green(self) -> bool:
        """Whether no promise was broken and no requested case is missing."""
        return self not in (Verdict.BROKEN, Verdict.NOT_EXERCISED)


@dataclass(frozen=True, slots=True)
class Promise:
    """Equal bits, or equal tokens with log probabilities within a tolerance, or the tolerance alone."""

    words: str
    tolerance: float = 0.0
    """In nats."""
    tokens: bool = True
    """Whether tokens must be equal."""

    def judge(self, found: Comparison) -> Verdict:
        """Judge a comparison; requests without a complete answer break every promise."""
        if found.failures:
            return Verdict.BROKEN
        if found.num_different == 0:
            return Verdict.EQUAL
        if self.tolerance == 0 or (self.tokens and found.num_other_tokens):
            return Verdict.BROKEN
        return Verdict.CLOSE if found.largest_gap <= self.tolerance else Verdict.BROKEN


BITS = Promise("same bits")


def close(dtype: str) -> Promise:
    """The promise without equality: the same distribution up to rounding."""
    tolerance = TOLERANCES.get(dtype, max(TOLERANCES.values()))
    return Promise(f"within {tolerance:g}", tolerance, tokens=False)


def same_tokens(tolerance: float) -> Promise:
    """The promise of equal tokens, and of log probabilities within the tolerance."""
    return Promise(f"same tokens, within {tolerance:g}", tolerance)
