"""Names of operators, and the time that none of them takes."""

from __future__ import annotations

import pytest
from bench.profile import label, table


@pytest.mark.parametrize(
    ("name", "sizes", "shown"),
    [
        ("aten::mm", [[2, 3], [3, 4]], "aten::mm"),
        (
            "millrace::linear",
            [[32, 576], [], [1536, 576], [1, 2]],
            "millrace::linear 32x576, 1536x576",
        ),
        ("millrace::attend", [[], [7]], "millrace::attend"),
    ],
)
def test_our_operators_are_told_apart_by_their_matrices(
    name: str, sizes: list[list[int]], shown: str
) -> None:
    assert label(name, sizes) == shown


def test_the_rest_of_a_step_is_between_operators() -> None:
    lines = table({"a": 60.0, "b": 25.0}, 100.0).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert cells[0] == ["a", "60.0", "60.0 %"]
    assert cells[-1] == ["between operators (Python, numpy)", "15.0", "15.0 %"]
