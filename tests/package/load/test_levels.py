"""Levels as they are written on the command line."""

from __future__ import annotations

import pytest
from bench.comparison.cases import DEFAULT_LEVELS

from millrace.load.levels import closed, parse_level, poisson


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("c8:128+64", closed(8, 128, 64)),
        ("c32:128+128x1", closed(32, 128, 128, rounds=1)),
        ("r4:128+64", poisson(4.0, 128, 64, num_requests=100)),
        ("r0.5:16+8x10", poisson(0.5, 16, 8, num_requests=10)),
    ],
)
def test_a_level_reads_as_it_is_written(text: str, level: object) -> None:
    assert parse_level(text) == level


@pytest.mark.parametrize("text", ["", "c", "x8:1+1", "c8", "c8:128", "c8:a+b", "c0:1+1", "c1:0+1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="level"):
        parse_level(text)


def test_no_two_default_levels_share_a_name() -> None:
    for levels in DEFAULT_LEVELS.values():
        assert len({level.name for level in levels}) == len(levels)
