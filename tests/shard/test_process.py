"""Ends of a process that no Python code can delay."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millrace_shard.errors import LONGEST_MESSAGE, ModelError, WeightsError

CODE = """
import ctypes
from millrace_shard.process import end_in

end_in(0.2, 75)
# A call through PyDLL keeps the interpreter lock, so that no other thread runs.
ctypes.PyDLL(None).sleep(100)
"""


def test_a_process_that_keeps_the_interpreter_lock_ends_in_time() -> None:
    answer = subprocess.run([sys.executable, "-c", CODE], check=False, timeout=60)
    assert answer.returncode == 75


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
