"""Devices and shards are chosen before any child starts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.commands import Programs
from millrace_launcher.settings.prepare import prepare

NVIDIA_SMI = """#!/bin/sh
echo NVIDIA H100
echo NVIDIA H100
"""


@pytest.mark.parametrize(
    ("device", "num_shard", "compute_type"),
    [("cpu", 1, None), ("cuda", 2, "2-nvidia-h100"), ("auto", 2, "2-nvidia-h100")],
)
def test_devices_count_where_the_model_runs_on_them(
    device: str,
    num_shard: int,
    compute_type: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = read_settings([f"--device={device}", f"--shard-uds-path={tmp_path}/shard"])
    with ExitStack() as claims:
        commands = prepare(settings, Programs(), claims)
    assert (commands.num_shard, commands.compute_type) == (num_shard, compute_type)
