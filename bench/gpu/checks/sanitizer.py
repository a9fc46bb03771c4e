"""compute-sanitizer over one mixed step and one replay of a tiny model."""

from __future__ import annotations

import shutil
import subprocess
import sys

from bench.gpu.figures import check, unchecked
from bench.gpu.setting import Emit, Setting

TOOLS = ("memcheck", "racecheck")
SANITIZER = "compute-sanitizer"
ERROR_STATUS = 9
TAIL_LINES = 15


def run(setting: Setting, emit: Emit) -> None:
    """Emit the exit status under each tool; without the sanitizer or a GPU, the plain program's."""
    program = [
        *(sys.executable, "-m", "bench.gpu.programs.mixed_step"),
        *(f"--device={setting.device.type}", "--", *setting.flags),
    ]
    sanitizer = shutil.which(SANITIZER) if setting.is_cuda else None
    if sanitizer is None:
        status = _status(program, setting.seconds_left())
        emit(check("a mixed step and a replay", status, "exit status"))
        reason = f"{SANITIZER} is not installed" if setting.is_cuda else "needs a GPU"
        for tool in TOOLS:
            emit(unchecked(tool, reason))
        return
    for place, tool in enumerate(TOOLS):
        command = [sanitizer, f"--tool={tool}", f"--error-exitcode={ERROR_STATUS}", *program]
        limit = setting.seconds_left() / (len(TOOLS) - place)
        try:
            emit(check(tool, _status(command, limit), "exit status"))
        except subprocess.TimeoutExpired:
            emit(unchecked(tool, f"not done within {limit:.0f} s"))


def _status(command: list[str], limit: float) -> int:
    """The exit status; the end of the output of a failed command is printed."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=limit,
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-TAIL_LINES:]), flush=True)
    return done.returncode
