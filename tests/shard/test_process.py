"""Ends of a process that no Python code can delay."""

from __future__ import annotations

import subprocess
import sys

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
