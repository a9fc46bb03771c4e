"""The GPUs that the kernels can use, and the reason where a host shows GPUs and none can be used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from millrace_proto.gpus import (
    WSL_LIBRARIES,
    device_files,
    driver_version,
    is_wsl,
)

LEAST_CAPABILITY = (8, 0)
"""Ampere. Products of earlier GPUs leave their tensor cores in Triton, and they have no bfloat16."""
LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The first version of NVIDIA's driver for Linux that runs a major version of CUDA."""
WHEELS = "https://download.pytorch.org/whl"
OLDER_CUDA, OLDER_BUILD = 12, f"{WHEELS}/cu126"
"""The build of torch for drivers that are too old for CUDA 13."""


@dataclass(frozen=True, slots=True)
class GpuReport:
    """The GPUs of this host."""

    names: tuple[str, ...] = ()
    """Names of those that can be used, in the order of torch: of all, or of none."""
    problem: str | None = None
    """Why there are none; None where there are some."""


def report(*, plain: bool = False) -> GpuReport:
    """The GPUs that a shard can use; `plain`: on plain PyTorch, which runs on any that torch supports."""
    if not torch.cuda.is_available():
        return GpuReport(problem=_why_none())
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if not plain and (problem := _why_unfit(devices)):
        return GpuReport(problem=f"{problem}; --disable-custom-kernels runs on plain PyTorch there")
    return GpuReport(tuple(device.name for device in devices))


def _why_unfit(devices: list[Any]) -> str | None:
    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for AMD's GPUs (ROCm), and the kernels are for NVIDIA's"
    for number, device in enumerate(devices):
        if (device.major, device.minor) < LEAST_CAPABILITY:
            least = ".".join(map(str, LEAST_CAPABILITY))
            return (
                f"GPU {number}, {device.name}, has compute capability {device.major}.{device.minor},"
                f" and the kernels need {least} (Ampere) or later"
            )
    return None


def _why_none() -> str:
    """Why torch sees no GPU."""
    version, cuda = torch.__version__, torch.version.cuda
    if torch.version.hip is not None:
        return f"torch {version} is built for AMD's GPUs (ROCm), of which it sees none"
    if cuda is None:
        return (
            f"torch {version} is built without CUDA: install the build of {WHEELS}/cu130,"
            f" or of {OLDER_BUILD} where NVIDIA's driver is older than {LEAST_DRIVERS[13]}"
        )
    driver, major = driver_version(), int(cuda.partition(".")[0])
    least = LEAST_DRIVERS.get(major)
    if driver and least and int(driver.partition(".")[0]) < least:
        runs_older = (
            major > OLDER_CUDA and int(driver.partition(".")[0]) >= LEAST_DRIVERS[OLDER_CUDA]
        )
        other = f", or install torch from {OLDER_BUILD}" if runs_older else ""
        return (
            f"NVIDIA's driver is {driver}, and torch {version} for CUDA {cuda} needs {least} or later:"
            f" update the driver{other}"
        )
    if closed := [str(path) for path in device_files() if not os.access(path, os.R_OK | os.W_OK)]:
        return f"this user may not open {', '.join(closed)}"
    if is_wsl() and not (WSL_LIBRARIES / "libcuda.so.1").exists():
        return (
            f"{WSL_LIBRARIES}/libcuda.so.1 is missing: WSL takes the driver of Windows;"
            " update it there, and install none inside WSL"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"torch {version} for CUDA {cuda} reports: {str(error).partition(chr(10))[0]}"
    return f"torch {version} for CUDA {cuda} sees no CUDA device"


def gpu_description(device: torch.device) -> str:
    """Name, compute capability, memory and driver of a GPU, for the log."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"GPU {device.index or 0}, {properties.name} (compute capability {properties.major}.{properties.minor},"
        f" {total / 2**30:.1f} GiB, {free / 2**30:.1f} free), driver {driver_version() or 'unknown'}"
    )
