"""The measure of all rules: what does not fit a pattern."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace_testing.contract.contract import ABSENT, exactly, fits


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (1, 1),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"a": None}, {"a": ABSENT}),
        ({}, {"a": ABSENT}),
        ([{"a": 1}], [{"a": int}]),
        ("ab", re.compile("a.")),
        ({"a": 1, "b": [2]}, exactly({"a": 1, "b": [2]})),
        (None, ...),
    ],
)
def test_values_that_fit_are_accepted(given: Any, pattern: Any) -> None:
    assert fits(given, pattern)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        (1, 2),
        (1, True),
        (False, 0),
        ({}, {"a": 1}),
        ({"a": 2}, {"a": 1}),
        ({"a": 0}, {"a": ABSENT}),
        ([], [1]),
        ([1, 1], [1]),
        ("abc", re.compile("a.")),
        ({"a": "1"}, {"a": int}),
        ({"b": 2, "a": 1}, exactly({"a": 1, "b": 2})),
        ({"a": 1, "b": 2}, exactly({"a": 1})),
        ("text", {"a": 1}),
    ],
)
def test_values_that_do_not_fit_are_refused(given: Any, pattern: Any) -> None:
    assert not fits(given, pattern)
