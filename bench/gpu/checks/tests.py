"""The tests that need a device; at the time limit the finished tests count."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec

from bench.gpu import goals
from bench.gpu.figures import Figure, unchecked
from bench.gpu.setting import Emit, Setting
from bench.harness.paths import ROOT

OUTCOME = re.compile(r"::\S.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
"""The outcome in pytest's line of a finished test."""
NAME = "tests of the device"


def run(setting: Setting, emit: Emit) -> None:
    """Emit the exit status and the number of each outcome."""
    if find_spec("pytest") is None:
        emit(unchecked(NAME, "pytest is not installed"))
        return
    paths = sorted(str(path) for pattern in setting.scale.tests for path in ROOT.glob(pattern))
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    outcomes: Counter[str] = Counter()
    status: int | None = None
    with subprocess.Popen(
        [*command, *paths],
        cwd=ROOT,
        # Installed plugins may warn, and warnings are errors.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            status = _count(process, setting, outcomes)
        finally:
            process.kill()
            emit(_figure(outcomes, status))


def _count(process: subprocess.Popen[str], setting: Setting, outcomes: Counter[str]) -> int | None:
    """Count the outcomes until the tests end, and return their exit status, or None at the time limit."""
    assert process.stdout is not None
    for line in process.stdout:
        outcome = OUTCOME.search(line)
        if outcome:
            outcomes[outcome[1].lower()] += 1
        if not outcome or outcome[1] in ("FAILED", "ERROR"):
            print(line, end="", flush=True)
        if not setting.has_time_for(0):
            return None
    return process.wait()


def _figure(outcomes: Counter[str], status: int | None) -> Figure:
    summary = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    return Figure(
        name=NAME,
        value=float(goals.STOPPED if status is None else status),
        unit="exit status",
        kind=goals.TESTS,
        detail={
            "summary": summary or "none ran",
            "failed": outcomes["failed"] + outcomes["error"],
            "skipped": outcomes["skipped"],
        },
    )
