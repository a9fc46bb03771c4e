"""The output of `--env`: facts for bug reports."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from millrace_launcher.config import HostVariables
from millrace_proto.version import VERSION

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "aiohttp", "grpcio")
PROGRAM_SECONDS = 30


def runtime_info(variables: HostVariables) -> str:
    """Target, versions, commit, container label and accelerators."""
    rows = {
        "Target": f"{platform.machine()}-{platform.system().lower()}",
        "Python version": platform.python_version(),
        "millrace": VERSION,
        **{package: version_of(package) for package in PACKAGES},
        "Commit sha": variables.vergen_git_sha or _git_commit() or "N/A",
        "Docker label": variables.docker_label or "N/A",
        "Cores": str(os.cpu_count()),
        "nvidia-smi": output_of("nvidia-smi") or "N/A",
        "xpu-smi": output_of("xpu-smi", "discovery") or "N/A",
        "hl-smi": output_of("hl-smi") or "N/A",
    }
    return "\n".join(
        ("Runtime environment:", *(f"{name}: {value}" for name, value in rows.items()))
    )


def millrace_version() -> str:
    return VERSION


def version_of(package: str) -> str:
    """The version of an installed package, else `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git_commit() -> str | None:
    root = Path(__file__).resolve().parents[3]
    return (
        output_of("git", "-C", str(root), "rev-parse", "HEAD") if (root / ".git").exists() else None
    )


def output_of(program: str, *arguments: str) -> str | None:
    """Return the stdout of a program; None if the program is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603
            [path, *arguments], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return done.stdout.strip()
