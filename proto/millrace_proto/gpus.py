"""What a host shows of its GPUs without torch: names, the driver, device files."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia")
WSL_LIBRARIES = Path("/usr/lib/wsl/lib")
"""Windows' part of NVIDIA's driver under WSL, which has no device files of NVIDIA's."""
PROGRAM = "nvidia-smi"
QUERY_SECONDS = 30
VERSION = re.compile(r"\b\d{3,}\.\d+(?:\.\d+)?\b")


def query_gpus(column: str) -> list[str]:
    """One column of `nvidia-smi` by GPU, such as `uuid` or `name`; empty without a driver."""
    program = shutil.which(PROGRAM) or shutil.which(PROGRAM, path=str(WSL_LIBRARIES))
    if program is None:
        return []
    command = [program, f"--query-gpu={column}", "--format=csv,noheader"]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def device_files() -> list[Path]:
    """The device files of NVIDIA's GPUs, one for each."""
    return sorted(DEVICES.glob("nvidia[0-9]*"))


def is_wsl() -> bool:
    """Whether this is Linux on Windows with a GPU that Windows shares."""
    return (DEVICES / "dxg").exists()


def shown_gpus() -> list[str]:
    """What to call each GPU that this host shows, whether torch can use it or not: its name, else its device file."""
    names = query_gpus("name")
    if not names and is_wsl():
        return ["a GPU of Windows"]
    return names or [str(path) for path in device_files()]


def driver_version() -> str | None:
    """The version of NVIDIA's driver, such as 580.65.06; None where the host does not say."""
    try:
        text = (DRIVER / "version").read_text()
    except OSError:
        versions = query_gpus("driver_version")
        text = versions[0] if versions else ""
    match = VERSION.search(text)
    return match[0] if match else None
