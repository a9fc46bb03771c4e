"""The folder `.gpu-bundle`: wheels for a machine without a network, and compiled protobuf code.

This module imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = ".gpu-bundle"
WHEELS = "wheels"
PROTO = "proto"
PROTO_SOURCE = Path("proto/millrace_proto/generate.proto")
DIGEST = "generate.proto.sha256"
INSTALL_SECONDS = 60
PYTHON = (3, 12)
"""The Python version of the compiled wheels."""


class BundleError(Exception):
    """The bundle cannot be used; the message says why."""


def use_bundle(root: Path, site: Path) -> tuple[Path, ...]:
    """Install the wheels into `site`, add missing protobuf code to the checkout, and return the folders for the path.

    Without a bundle it does nothing. Raises BundleError, also for another Python version.
    """
    bundle = root / FOLDER
    if not bundle.is_dir():
        return ()
    _place_proto(root, bundle)
    if sys.version_info[:2] != PYTHON:
        wanted, found = (".".join(map(str, version[:2])) for version in (PYTHON, sys.version_info))
        raise BundleError(f"its wheels are for Python {wanted}, and this is {found}")
    wheels = sorted(str(path) for path in (bundle / WHEELS).glob("*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--root-user-action=ignore", f"--target={site}", *wheels]
    # The user's pip settings may name another folder of wheels, which must not be used.
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise BundleError(f"pip took over {INSTALL_SECONDS} s") from error
    if done.returncode:
        raise BundleError(f"pip ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")
    return (site,)


def digest(proto: Path) -> str:
    """Return the SHA-256 of the source of the protobuf code."""
    return hashlib.sha256(proto.read_bytes()).hexdigest()


def is_proto_current(root: Path) -> bool:
    """Return whether the bundle's protobuf code was compiled from the checkout's source."""
    kept = root / FOLDER / DIGEST
    return kept.exists() and kept.read_text().strip() == digest(root / PROTO_SOURCE)


def _place_proto(root: Path, bundle: Path) -> None:
    target = root / PROTO_SOURCE.parent
    if list(target.glob("*_pb2.py")):
        return
    if not is_proto_current(root):
        raise BundleError(
            "its protobuf code is of another generate.proto: python -m bench.gpu.bundle"
        )
    for path in (bundle / PROTO).glob("*.py"):
        shutil.copy2(path, target / path.name)
