"""The folder .gpu-bundle: wheels for a machine without a network, and compiled protobuf code.

Standard library alone.
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
"""The only one whose compiled wheels are in it."""


class BundleError(Exception):
    """The bundle is there but of no use; the message says why."""


def use_bundle(root: Path, site: Path) -> tuple[Path, ...]:
    """Install the wheels into `site`, and put the protobuf code where the checkout has none; folders for the path.

    Nothing where there is no bundle. Raises BundleError, for another Python too.
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
    # A folder of wheels named by the user's own settings must not take part.
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
    """Of the source that the protobuf code was compiled from."""
    return hashlib.sha256(proto.read_bytes()).hexdigest()


def is_proto_current(root: Path) -> bool:
    """Whether the bundle's protobuf code was compiled from the checkout's source."""
    kept = root / FOLDER / DIGEST
    return kept.exists() and kept.read_text().strip() == digest(root / PROTO_SOURCE)


def _place_proto(root: Path, bundle: Path) -> None:
    target = root / PROTO_SOURCE.parent
    if list(target.glob("*_pb2.py")):
        return
    if not is_proto_current(root):
        raise BundleError("its protobuf code is of another generate.proto: make bench-gpu-bundle")
    for path in (bundle / PROTO).glob("*.py"):
        shutil.copy2(path, target / path.name)
