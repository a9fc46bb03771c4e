"""Comparisons of two rounds: which bits differ, from which position, by how much, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from millrace.verify.answers import (
    Candidates,
    ExactAnswer,
    Scored,
    StreamError,
    answer_from,
    as_float32,
    same_bits,
)
from millrace.verify.comparison import (
    BITS,
    Comparison,
    Place,
    Promise,
    Verdict,
    close,
    compare,
    same_tokens,
)
from millrace.verify.questions import Question
from millrace.verify.reference import Greedy, until_tie
from millrace.verify.report import judged, unchecked

GREEDY = Question(text="?", input_ids=(1, 2), max_new_tokens=3, parameters={})
NEXT_FLOAT32 = -1.5000001192092896
"""The neighbour of -1.5."""


def answer(
    ids: Sequence[int], logprobs: Sequence[float] | None = None, text: str | None = None
) -> ExactAnswer:
    values = tuple(logprobs) if logprobs is not None else (-1.5,) * len(ids)
    return ExactAnswer(ids=tuple(ids), logprobs=values, text=text, finish_reason="length")


def beside(*candidates: Candidates) -> ExactAnswer:
    """Three fixed tokens with the given details."""
    return replace(answer([1, 2, 3]), candidates=candidates)


def scoring(logprob: float, candidate: float = -2.0) -> ExactAnswer:
    """Three fixed tokens with a prompt of two."""
    prompt = Scored(
        ids=(7, 8), logprobs=(math.nan, logprob), candidates=((), ((9, candidate), (8, logprob)))
    )
    return replace(answer([1, 2, 3]), prompt=prompt)


def event(index: int, id_: int, logprob: float | None, text: str | None = None) -> dict[str, Any]:
    details = {"finish_reason": "length", "cached_tokens": 7} if text is not None else None
    token = {"id": id_, "text": "x", "logprob": logprob, "special": False}
    return {"index": index, "token": token, "generated_text": text, "details": details}


def one(expected: ExactAnswer, found: ExactAnswer, question: Question = GREEDY) -> Comparison:
    return compare([question], [expected], [found])


def test_a_stream_is_put_together_exactly() -> None:
    found = answer_from([event(1, 5, -1.3242188), event(2, 6, None), event(3, 7, -0.0, "xxx")])
    assert found.ids == (5, 6, 7)
    assert found.logprobs[0] == -1.32421875, "the float32, not the decimal"
    assert math.isnan(found.logprobs[1])
    assert math.copysign(1, found.logprobs[2]) == -1
    assert (found.text, found.finish_reason, found.cached_tokens) == ("xxx", "length", 7)
    assert found.error is None


def test_candidates_are_put_together_with_their_tokens() -> None:
    top = [{"id": 5, "logprob": -0.1}, {"id": 6, "logprob": None}]
    found = answer_from([{**event(1, 5, -0.1), "top_tokens": top}, event(2, 6, -0.2, "xx")])
    first, second = found.candidates
    assert [id_ for id_, _ in first] == [5, 6]
    assert first[0][1] == as_float32(-0.1) != -0.1
    assert math.isnan(first[1][1])
    assert second == ()


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([event(2, 5, -1.0, "x")], id="gap"),
        pytest.param([event(1, 5, -1.0), event(1, 5, -1.0, "x")], id="repeat"),
        pytest.param([event(1, 5, -1.0, "x"), event(2, 5, -1.0)], id="more after the end"),
        pytest.param([{"choices": []}], id="another server's"),
    ],
)
def test_a_stream_that_is_not_whole_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(StreamError):
        answer_from(events)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([event(1, 5, -1.0)], "the stream ended without its last event"),
        ([event(1, 5, -1.0), {"error": "it broke", "error_type": "generation"}], "it broke"),
    ],
    ids=["cut off", "error event"],
)
def test_an_unfinished_stream_keeps_its_tokens_and_has_a_reason(
    events: list[dict[str, Any]], error: str
) -> None:
    found = answer_from(events)
    assert (found.ids, found.error) == ((5,), error)


def test_bits_are_compared_as_float32() -> None:
    assert same_bits(as_float32(-1.3242188), -1.32421875)
    assert same_bits(math.nan, math.nan)
    assert not same_bits(0.0, -0.0)
    assert not same_bits(-1.5, NEXT_FLOAT32)


def test_one_bit_of_a_logprob_is_a_difference() -> None:
    found = one(answer([1, 2, 3]), answer([1, 2, 3], [-1.5, NEXT_FLOAT32, -1.5]))
    assert (found.num_different, found.num_other_tokens) == (1, 0)
    assert found.first_difference == Place(0, 1)
    assert found.largest_gap == pytest.approx(1.19e-7, rel=0.01)
    assert BITS.judge(found) is Verdict.BROKEN
    assert close("float32").judge(found) is Verdict.CLOSE


@pytest.mark.parametrize(
    ("candidates", "gap"),
    [
        (((4, -2.0), (5, NEXT_FLOAT32)), 1.19e-7),
        (((4, -2.0), (6, -1.5)), 0.0),
        (((5, -1.5), (4, -2.0)), 0.0),
        (((4, -2.0),), 0.0),
        ((), math.inf),
    ],
    ids=["one bit", "another one", "another order", "one fewer", "none"],
)
def test_other_candidates_of_the_same_tokens_are_a_difference(
    candidates: Candidates, gap: float
) -> None:
    usual: Candidates = ((4, -2.0), (5, -1.5))
    found = one(beside(usual, usual, usual), beside(usual, usual, candidates))
    assert (found.num_different, found.num_other_tokens) == (1, 0)
    assert found.first_difference == Place(0, 2)
    assert found.largest_gap == pytest.approx(gap, rel=0.01)
    assert BITS.judge(found) is Verdict.BROKEN
    assert close("float32").judge(found) is (Verdict.CLOSE if gap < 1 else Verdict.BROKEN)


@pytest.mark.parametrize(
    ("other", "gap"),
    [
        (scoring(NEXT_FLOAT32), 1.19e-7),
        (scoring(-1.5, candidate=-2.25), 0.25),
        (scoring(math.nan), math.inf),
        (answer([1, 2, 3]), math.inf),
    ],
    ids=["one bit", "a candidate", "no number", "not scored"],
)
def test_a_prompt_that_is_scored_otherwise_is_a_difference(other: ExactAnswer, gap: float) -> None:
    found = one(scoring(-1.5), other)
    assert (found.num_different, found.num_other_tokens) == (1, 0)
    place = found.first_difference
    assert place is not None
    assert place.in_prompt
    assert found.largest_gap == pytest.approx(gap, rel=0.01)
    assert BITS.judge(found) is Verdict.BROKEN
    assert close("bfloat16").judge(found) is (Verdict.CLOSE if gap < 0.5 else Verdict.BROKEN)


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    found = one(answer([1, 2, 3, 4]), answer([1, 9, 8, 7], [-1.5, -1.75, -9, -9]))
    assert found.num_tokens == 2
    assert found.num_other_tokens == 1
    assert found.first_difference == Place(0, 1)
    assert found.largest_gap == 0.25, "greedy tokens that differ are each the best"


def test_another_text_of_the_same_tokens_is_a_difference() -> None:
    found = one(answer([1, 2], text="ab"), answer([1, 2], text="a\ufffd"))
    assert (found.num_different, found.first_difference) == (1, Place(0, 2))
    assert BITS.judge(found) is Verdict.BROKEN


def test_the_earliest_difference_of_all_requests_is_named() -> None:
    expected = [answer([1, 2, 3]), answer([1, 2, 3]), answer([1, 2, 3])]
    found = [answer([1, 2, 4]), answer([1, 3, 4]), answer([1, 2, 3])]
    result = compare([GREEDY] * 3, expected, found)
    assert (result.num_different, result.first_difference) == (2, Place(1, 1))


def test_a_request_that_failed_breaks_every_promise() -> None:
    failed = ExactAnswer(ids=(1,), logprobs=(-1.5,), error="gone")
    found = one(answer([1, 2]), failed)
    assert found.failures == ("request 0: gone",)
    for promise in (BITS, close("float32"), same_tokens(1.0)):
        assert promise.judge(found) is Verdict.BROKEN
    assert "gone" in judged("batched", "t", BITS, found).note


@pytest.mark.parametrize(
    ("promise", "found", "verdict"),
    [
        (BITS, {}, Verdict.EQUAL),
        (BITS, {"num_different": 1}, Verdict.BROKEN),
        (same_tokens(0.1), {"num_different": 1, "largest_gap": 0.1}, Verdict.CLOSE),
        (same_tokens(0.1), {"num_different": 1, "largest_gap": 0.2}, Verdict.BROKEN),
        (same_tokens(0.1), {"num_different": 1, "num_other_tokens": 1}, Verdict.BROKEN),
        (close("float32"), {"num_different": 1, "num_other_tokens": 1}, Verdict.CLOSE),
        (close("float32"), {"num_different": 1, "largest_gap": 0.2}, Verdict.BROKEN),
        (close("bfloat16"), {"num_different": 1, "largest_gap": 0.2}, Verdict.CLOSE),
    ],
    ids=["equal", "bit", "tokens", "tokens far", "other tokens", "close", "far", "bfloat16"],
)
def test_a_promise_judges_a_comparison_by_its_own_rule(
    promise: Promise, found: dict[str, Any], verdict: Verdict
) -> None:
    assert promise.judge(Comparison(num_requests=1, num_tokens=1, **found)) is verdict


def test_equality_proves_nothing_where_nothing_happened() -> None:
    equal = Comparison(num_requests=1, num_tokens=1)
    row = judged("preempted", "t", BITS, equal, exercised=False)
    assert row.verdict is Verdict.NOT_EXERCISED
    assert not row.verdict.is_green


def test_an_unchecked_case_is_red_only_if_it_was_requested() -> None:
    assert unchecked("tensor-parallel", "t", "why", asked_for=False).verdict.is_green
    assert not unchecked("tensor-parallel", "t", "why", asked_for=True).verdict.is_green


def test_a_tie_ends_the_comparison_with_the_reference() -> None:
    greedy = Greedy(answer([1, 2, 3], [-0.5, -1.0, -0.1]), ((8, -3.0), (9, -1.0005), (8, -4.0)))
    found = answer([1, 9, 7], [-0.5, -1.0004, -0.2], text="abc")
    one_, other, is_tie = until_tie(greedy, found, 1e-3)
    assert is_tie
    assert (one_.ids, other.ids) == ((1,), (1,))


@pytest.mark.parametrize(
    ("other", "gap"), [(9, 0.01), (7, 0.0001)], ids=["not as likely", "not the second best"]
)
def test_another_token_that_is_no_tie_is_kept(other: int, gap: float) -> None:
    greedy = Greedy(answer([1, 2], [-0.5, -1.0]), ((8, -3.0), (9, -1.0 - gap)))
    _, found, is_tie = until_tie(greedy, answer([1, other], text="ab"), 1e-3)
    assert not is_tie
    assert found.ids == (1, other)
    assert (found.text, found.finish_reason) == (None, None), "the reference has none"
