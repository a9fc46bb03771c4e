"""Child processes with a time limit; their output is shown and kept, and their descendants end with them.

This module imports the standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

GRACE_SECONDS = 15.0
UNUSABLE = 3
"""Exit status of a stage that finds that no stage can work; the last line of its output says why."""
SHARED_MEMORY = Path("/dev/shm")
TAIL_LINES = 60

PROBE = """
import sys, torch
from millrace_proto.gpus import shown_gpus
from millrace_shard.variables import GpuVariables
is_shown = torch.cuda.is_available() or (not GpuVariables().hides_gpus and shown_gpus())
sys.exit(0 if is_shown else 3)
"""
PROBE_SECONDS = 60.0

Status = Literal["ok", "failed", "timed out", "unusable", "skipped"]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child process."""

    status: Status
    seconds: float
    tail: tuple[str, ...]
    """The end of its output."""

    @property
    def reason(self) -> str:
        """Its last line."""
        return self.tail[-1] if self.tail else ""


def scratch_prefix(pid: int) -> str:
    """The prefix of the names of a stage's temporary folders."""
    return f"millrace-bench-{pid}-"


def find_device(environment: Mapping[str, str], cwd: Path) -> str:
    """Return "cuda" if the host shows a GPU, else "cpu", also where torch is missing or does not answer in time.

    A GPU that torch cannot use is "cuda", too: the first stage ends the run with the reason.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "cpu"
    return "cuda" if done.returncode == 0 else "cpu"


def run(
    command: Sequence[str], *, environment: Mapping[str, str], cwd: Path, limit_seconds: float
) -> Ended:
    """Run it up to the time limit; then send SIGTERM, and SIGKILL to its remaining descendants."""
    began = time.monotonic()
    child = subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert child.stdout is not None
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    reader = threading.Thread(target=_show, args=(child.stdout, tail, began), daemon=True)
    reader.start()
    has_timed_out = False
    try:
        child.wait(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        has_timed_out = True
    finally:
        _end(child)
    reader.join(timeout=GRACE_SECONDS)
    if not reader.is_alive():
        child.stdout.close()
    status = "timed out" if has_timed_out else _status(child.returncode)
    return Ended(status, time.monotonic() - began, tuple(tail))


def _status(code: int) -> Status:
    if code == UNUSABLE:
        return "unusable"
    return "ok" if code == 0 else "failed"


def _show(output: IO[str], tail: deque[str], began: float) -> None:
    for line in output:
        tail.append(line.rstrip("\n"))
        print(f"  {time.monotonic() - began:6.1f}  {tail[-1]}", flush=True)


def _end(child: subprocess.Popen[str]) -> None:
    """End it and its descendants, and remove its temporary folders."""
    family = _descendants(child.pid)
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE_SECONDS)
    for pid in (child.pid, *family):
        if pid != child.pid or child.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    child.wait()
    for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())):
        for left in folder.glob(f"{scratch_prefix(child.pid)}*"):
            shutil.rmtree(left, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    """All descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The name in parentheses may hold any character, spaces too.
        with suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = children.get(pid, []).copy()
    for each in found:
        found += children.get(each, [])
    return found
