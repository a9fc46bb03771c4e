"""Devices and shards are chosen before any child starts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from millrace_launcher.errors import NotEnoughCUDADevices
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.commands import Programs
from millrace_launcher.settings.prepare import prepare

NVIDIA_SMI = """#!/bin/sh
echo NVIDIA H100
echo NVIDIA H100
"""


def with_two_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)


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
    with_two_gpus(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = read_settings([f"--device={device}", f"--shard-uds-path={tmp_path}/shard"])
    with ExitStack() as claims:
        commands = prepare(settings, Programs(), claims)
    assert (commands.num_shard, commands.compute_type) == (num_shard, compute_type)


@pytest.mark.parametrize(
    ("device", "visible", "num_shard", "is_refused"),
    [
        ("cuda", None, 3, True),
        ("auto", None, 3, True),
        ("auto", "1", 2, True),
        ("auto", None, 2, False),
        ("cpu", None, 3, False),
        ("auto", "", 3, False),
    ],
)
def test_more_shards_than_gpus_are_refused_at_once(
    device: str,
    visible: str | None,
    num_shard: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_refused: bool,
) -> None:
    with_two_gpus(tmp_path, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = read_settings(
        [f"--device={device}", f"--num-shard={num_shard}", f"--shard-uds-path={tmp_path}/shard"]
    )
    with ExitStack() as claims:
        if is_refused:
            with pytest.raises(NotEnoughCUDADevices, match=f"{num_shard} shards need as many"):
                prepare(settings, Programs(), claims)
        else:
            assert prepare(settings, Programs(), claims).num_shard == num_shard
