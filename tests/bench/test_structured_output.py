"""What counts as whole and valid among answers under everyday schemas."""

from __future__ import annotations

import pytest
from bench.structured_output import everyday
from bench.structured_output.schemas import problem

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "reason", "outcome"),
    [
        ('{"a": 1}', "stop", everyday.ENDED),
        ('{"a": 1}', "length", everyday.CLOSED),
        ('{"a": 1, "b', "length", everyday.CUT),
        ('{"a": 1, "b": 2}', "stop", everyday.INVALID),
        ('{"a": "1"}', "stop", everyday.INVALID),
        ('{"a": 1', "stop", everyday.INVALID),
    ],
)
def test_each_answer_has_its_outcome(text: str, reason: str, outcome: str) -> None:
    assert everyday.outcome_of(text, reason, SCHEMA) == outcome


CHECKED_SCHEMA = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.01}}}


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [('{"a": 0.07}', True), ('{"a": 0.075}', False), ('{"a":', False), ('{"a": "x"}', False)],
)
def test_numbers_in_a_text_are_judged_as_exact_decimals(text: str, is_valid: bool) -> None:
    assert (problem(text, CHECKED_SCHEMA) is None) == is_valid
