from __future__ import annotations

import pytest

from millrace_shard.errors import LONGEST_MESSAGE, ModelError, WeightsError


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("tensor a is missing", "tensor a is missing"),
        ("tensor ü∞ is missing", "tensor ü∞ is missing"),
        ("first\nsecond\r\nthird", "first second third"),
        ("tensor \x1b[31m\x00\u202e is missing", r"tensor \x1b[31m\x00\u202e is missing"),
        ("x" * 3000, "x" * LONGEST_MESSAGE + "…"),
    ],
)
def test_a_message_is_one_line(message: str, shown: str) -> None:
    for kind in (ModelError, WeightsError):
        assert str(kind(message)) == shown
