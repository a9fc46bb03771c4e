"""The regression guard's verdict: what passes, what fails, what cannot be said."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.quick import (
    PASSED,
    SLOWER,
    TOLERANCE,
    UNKNOWN,
    Finding,
    read_floors,
    verdict,
    write_floors,
)


@pytest.mark.parametrize(
    ("share", "is_clean", "recorded", "status"),
    [
        (0.50, True, 0.50, PASSED),
        (0.90, True, 0.50, PASSED),
        (0.50 * TOLERANCE, True, 0.50, PASSED),
        (0.50 * TOLERANCE - 0.01, True, 0.50, SLOWER),
        (0.50 * TOLERANCE - 0.01, False, 0.50, UNKNOWN),
        (0.50, False, 0.50, PASSED),
        (0.50, True, None, UNKNOWN),
    ],
)
def test_a_case_against_its_floor(
    share: float, is_clean: bool, recorded: float | None, status: int
) -> None:
    assert Finding("x", share, is_clean, recorded).status == status


def test_one_slower_case_fails_the_whole() -> None:
    good, slow = Finding("a", 0.5, True, 0.5), Finding("b", 0.1, True, 0.5)
    unknown = Finding("c", 0.5, True, None)
    assert verdict([good, good]) == PASSED
    assert verdict([good, unknown]) == UNKNOWN
    assert verdict([unknown, slow, good]) == SLOWER
    assert "SLOWER" in slow.text


def test_floors_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "floors.json"
    assert read_floors(path) == {}
    write_floors(path, {"one stream": 0.71234, "first of 1024": 0.8})
    assert read_floors(path) == {"one stream": 0.712, "first of 1024": 0.8}
