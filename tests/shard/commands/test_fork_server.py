"""What a fork server must not have when it forks, and what others see of its forks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHECK = """
import threading
from millrace_shard.commands.fork_server import unclean
assert unclean() is None, unclean()
{}
print(unclean())
"""
THREAD = "threading.Thread(target=threading.Event().wait, name='of-a-library', daemon=True).start()"
CHANNEL = "import grpc; channel = grpc.insecure_channel('unix:/nowhere')"
RENAMED = """
import pathlib
from millrace_shard.commands.fork_server import rename_command
rename_command()
print(pathlib.Path("/proc/self/cmdline").read_bytes().split(bytes(1))[3:])
"""


def run(program: str, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout.strip()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(THREAD, "threads are running: of-a-library"), (CHANNEL, "gRPC is in use")],
)
def test_a_process_does_not_fork_with_what_a_fork_would_lack(fault: str, reason: str) -> None:
    assert run(CHECK.format(fault)) == reason


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_fork_is_shown_with_the_command_of_a_shard() -> None:
    shown = run(RENAMED, "fork-server", "--rank=1")
    assert shown.startswith("[b'serve'")
    assert "fork-server" not in shown
    assert "b'--rank=1'" in shown
