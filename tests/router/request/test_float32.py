"""Shortest float32 decimals against an oracle that tries every number of digits."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.request.float32 import rounded, shortest


def as_float32(value: float) -> bytes:
    return struct.pack("f", value)


def shortest_by_search(value: float) -> float:
    """The decimal of fewest digits that reads back to the same float32."""
    for digits in range(9):
        text = f"{value:.{digits}e}"
        if as_float32(float(text)) == as_float32(value):
            return float(text)
    raise AssertionError(value)


@settings(max_examples=300, deadline=None, database=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_equals_the_search(value: float) -> None:
    assert shortest(value) == shortest_by_search(value)


@settings(max_examples=300, deadline=None, database=None)
@given(st.integers(0, 2**32 - 1))
def test_any_bit_pattern_gets_its_shortest_decimal(bits: int) -> None:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    if math.isfinite(value):
        assert shortest(value) == shortest_by_search(value)
    else:
        assert shortest(value) is None


@pytest.mark.parametrize(
    ("widened", "text"),
    [
        (-1.3242188, "-1.3242188"),
        (0.1, "0.1"),
        (16777216.0, "16777216.0"),
        (8388.609, "8388.609"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
    ],
)
def test_reads_as_people_expect(widened: float, text: str) -> None:
    (value,) = struct.unpack("<f", as_float32(widened))
    assert repr(shortest(value)) == text


def test_numbers_are_rounded_to_float32() -> None:
    assert rounded(0.999999999999) == 1.0
    assert rounded(0.1) == struct.unpack("<f", as_float32(0.1))[0]
    with pytest.raises(ValueError, match="out of range"):
        rounded(1e39)
