"""What a fork server must not have when it forks, and what others see of its forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millrace_shard.commands import chosen_kernels
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.cpu import activation_gain

DEMO = Path(__file__).parents[3] / "demo/model"
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


def quantised(rank: int, **fields: object) -> ShardConfig:
    values = {"model_folder": DEMO, "quantize": "int4", "rank": rank, "world_size": 2}
    return ShardConfig.model_validate(values | fields)


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"launcher_fd": 3}, False),
        ({"launcher_fd": 3, "master_addr": "10.0.0.1"}, True),
        ({"launcher_fd": 3, "master_addr": "10.0.0.1", "quantize_activations": "exact"}, False),
        ({}, True),
        ({"quantize": None}, False),
    ],
    ids=str,
)
def test_only_ranks_of_several_launchers_choose_activations_together(
    fields: dict[str, object], *, needed: bool
) -> None:
    assert chosen_kernels.needs_group(quantised(1, **fields)) is needed


def test_ranks_of_one_launcher_take_the_activations_of_one_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are not connected, so a broadcast would fail."""
    monkeypatch.setattr(chosen_kernels, "LEAST_PARAMETERS", 0)
    monkeypatch.setattr(activation_gain, "cache_folder", lambda kind: tmp_path / kind)
    device = torch.device("cpu")
    results = [
        chosen_kernels.chosen_kernels(
            quantised(rank, launcher_fd=3), device, torch.bfloat16, ProcessGroup(rank, 2, device)
        ).activations
        for rank in (1, 0)
    ]
    assert results[0] == results[1]
    assert results[0] is not None
    assert results[0].gain is not None
    assert len(list(tmp_path.rglob("*.json"))) == 1
