"""gRPC has no handlers of forks in the router, because they crash the children of uvloop."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))
sys.meta_path.insert(0, Finder())
import millrace_router.__main__
"""


def test_the_setting_is_there_when_grpc_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0"]
