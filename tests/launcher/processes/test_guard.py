"""The children that the guard finds left."""

from __future__ import annotations

import pytest

from millrace_launcher.processes.guard import left_over


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], set()),
        (["11\n", "12\n"], {11, 12}),
        (["11\n", "12\n", "gone 11\n", "13\n"], {12, 13}),
        (["11\n", "gone 11\n", "11\n"], {11}),
        (["11\n", "done\n"], set()),
        (["gone 5\n", "x\n", "7"], {7}),
    ],
)
def test_only_children_that_have_not_ended(lines: list[str], left: set[int]) -> None:
    assert left_over(lines) == left
