"""Versions, facts of the machine, and the measured limits of the device."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec

import torch

from bench.gpu import goals
from bench.gpu.engine.clock import copy_rate, matrix_rate, read_rate
from bench.gpu.figures import Figure
from bench.gpu.setting import Emit, Setting
from bench.harness.paths import ROOT

PACKAGES = ("torch", "triton", "transformers", "grpcio", "aiohttp", "pydantic")
SMI = ("nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit,mig.mode.current")
SMI_SECONDS = 20.0


def run(setting: Setting, emit: Emit) -> None:
    """Emit the facts first, then each limit."""
    device, scale = setting.device, setting.scale
    cores = float(os.cpu_count() or 0)
    emit(Figure(name="machine", value=cores, unit="cores", detail=facts()))
    limits: dict[str, Callable[[], float]] = {
        goals.READ_RATE: lambda: read_rate(device, scale.buffer_bytes),
        goals.COPY_RATE: lambda: copy_rate(device, scale.buffer_bytes),
        goals.MATRIX_RATE: lambda: matrix_rate(device, scale.matrix_size),
    }
    for kind, measure in limits.items():
        value = measure() / goals.PREFIX[kind]
        emit(Figure(name=kind, value=value, unit=goals.UNIT[kind], kind=kind))


def facts() -> dict[str, str]:
    """Versions of packages and the commit, and with a GPU its properties."""
    found = {
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown",
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["CUDA of torch"] = torch.version.cuda or "none"
    found["nvidia-smi"] = _output(*SMI, "--format=csv,noheader") or "not there"
    found["FlashAttention-3"] = "there" if find_spec("flash_attn_interface") else "not there"
    found["compute-sanitizer"] = shutil.which("compute-sanitizer") or "not there"
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "compute capability": f"{major}.{minor}",
            "multiprocessors": str(properties.multi_processor_count),
            # The tilings of attention are fitted to it.
            "shared memory": str(getattr(properties, "shared_memory_per_block_optin", "unknown")),
        }
    return found


def _output(*command: str) -> str | None:
    """The output of a command in one line, or None if it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ")
