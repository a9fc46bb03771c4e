"""An earlier revision of this repository as one more server in a run, to measure the effect of a change."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from bench.harness.paths import PEERS_FOLDER, ROOT
from bench.harness.server import RunningServer, serving
from bench.peers.servers import OUR_FLAGS, Server
from bench.peers.worker import Limits

PACKAGES = ("launcher", "proto", "router", "shard")


def at_revision(revision: str) -> Server:
    """Our server as it was at a commit, tag or branch, on the installed dependencies.

    Raises ValueError where git does not know it, or where its protobuf code cannot be generated.
    """
    commit = _git("rev-parse", "--short", f"{revision}^{{commit}}").decode().strip()
    folder = PEERS_FOLDER / f"at-{commit}"
    if not folder.exists():
        _check_out(commit, folder)

    def start(
        model: Path, limits: Limits, log: Path, flags: Sequence[str]
    ) -> AbstractContextManager[RunningServer]:
        del limits
        flags = (*OUR_FLAGS, *flags)
        return serving(model, log=log, flags=flags, environment=environment_of(folder))

    return Server(name=commit, program=None, start=start)


def environment_of(folder: Path) -> dict[str, str]:
    """The environment in which Python finds the packages in `folder` before the installed ones."""
    return {"PYTHONPATH": os.pathsep.join(str(folder / package) for package in PACKAGES)}


def _check_out(commit: str, folder: Path) -> None:
    # Under another name until it is complete, so that an interrupted run leaves no folder that looks finished.
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, *PACKAGES))) as files:
        files.extractall(partial, filter="data")
    _output(sys.executable, str(partial / "proto" / "compile.py"))
    partial.rename(folder)


def _git(*arguments: str) -> bytes:
    return _output("git", "-C", str(ROOT), *arguments)


def _output(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"{command[0]}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
