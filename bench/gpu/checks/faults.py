"""Planted faults, each in its own process: an illegal access, memory taken away, a rank that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys

import torch

from bench.gpu.figures import Figure, check, unchecked
from bench.gpu.setting import Emit, Setting
from bench.harness.server import free_port

NEED_A_GPU = ("illegal_access", "memory_taken")
TAIL_LINES = 15
RANK_SECONDS = 60.0


def run(setting: Setting, emit: Emit) -> None:
    """Emit a figure for each fault; 0 means that it was seen as what it is, and survived where it can be."""
    for fault in NEED_A_GPU:
        name = fault.replace("_", " ")
        emit(planted(fault, setting) if setting.is_cuda else unchecked(name, "needs a GPU"))
    device = "cuda" if torch.cuda.device_count() > 1 else "cpu"
    emit(rank_killed(device))


def planted(fault: str, setting: Setting) -> Figure:
    """Run the program of a fault, whose exit status says whether it was classified rightly."""
    done = subprocess.run(
        [sys.executable, "-m", f"bench.gpu.programs.{fault}", *setting.flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=setting.seconds_left(),
    )
    lines = done.stdout.splitlines()
    if done.returncode:
        print("\n".join(lines[-TAIL_LINES:]), flush=True)
    said = lines[-1] if lines else ""
    return check(fault.replace("_", " "), done.returncode, "exit status", {"said": said})


def missed_by(status: int, device: str) -> int:
    """The exit status of the surviving rank; 0 where it is as designed.

    Between the GPUs of a host NCCL sees no closed socket: its watchdog aborts the process that waits for the device.
    """
    return 0 if device == "cuda" and status == -signal.SIGABRT else status


def rank_killed(device: str) -> Figure:
    """Kill rank 1 of two between collectives of a loop; rank 0 has to end, with CollectiveError over gloo."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.programs.rank", str(rank), str(port), device],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    survivor, victim = ranks
    try:
        assert victim.stdout is not None
        # It writes a line after its first collective, and goes on with others.
        started = victim.stdout.readline()
        victim.kill()
        said, _ = survivor.communicate(timeout=RANK_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
    lines = said.splitlines()
    return check(
        f"a rank killed inside a collective, {'NCCL' if device == 'cuda' else 'gloo on CPU'}",
        missed_by(survivor.returncode, device) if started else float("inf"),
        "exit status of the other rank",
        {"said": lines[-1] if lines else ""},
    )
