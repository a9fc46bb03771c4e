"""`millrace-verify` on the demo model, or without a GPU on one layer, with deterministic mode on and off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.gpu.engine.checkpoint import temporary_checkpoint
from bench.gpu.figures import Figure, check, unchecked
from bench.gpu.setting import Emit, Setting
from bench.harness.paths import DEMO

MODES = ("on", "off")
SHARE = {"on": 0.6, "off": 0.8}
"""The share of the time that is left, by mode; servers need the rest to end."""
STOP_SECONDS = 10.0


def run(setting: Setting, emit: Emit) -> None:
    """Emit a figure for each mode."""
    with ExitStack() as stack:
        model = DEMO
        if setting.scale.verified is not None:
            checkpoint = temporary_checkpoint(setting.scale.verified, setting.device)
            model = stack.enter_context(checkpoint)
        for mode in MODES:
            name = f"millrace-verify, deterministic {mode}"
            limit = SHARE[mode] * setting.seconds_left()
            try:
                emit(verified(name, report(command(setting, model, mode), limit)))
            except subprocess.TimeoutExpired:
                emit(unchecked(name, f"not done within {limit:.0f} s"))


def command(setting: Setting, model: Path, mode: str) -> list[str]:
    """The command line of `millrace-verify`."""
    return [
        *(sys.executable, "-m", "millrace.verify", str(model), "--json"),
        *(*setting.scale.verify_flags, f"--log-dir={setting.out / f'verify-{mode}'}"),
        *("--", *setting.flags, f"--deterministic={mode}"),
    ]


def report(words: Sequence[str], limit: float) -> dict[str, Any]:
    """The report; RuntimeError if no server starts. After `limit` seconds the command is ended, with its servers."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            text, _ = process.communicate(timeout=limit)
        finally:
            # SIGTERM lets it end its servers.
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    if not text:
        raise RuntimeError(f"millrace-verify ended with {process.returncode}")
    found: dict[str, Any] = json.loads(text)
    return found


def verified(name: str, found: dict[str, Any]) -> Figure:
    """The number of rows of the report that did not pass."""
    rows: Sequence[dict[str, Any]] = found["rows"]
    return check(
        name,
        sum(not row["passed"] for row in rows),
        f"of {len(rows)} comparisons failed",
        {
            "server": ", ".join(f"{key} {found['server'][key]}" for key in ("dtype", "device")),
            "rows": {row["title"]: row["verdict"] for row in rows},
        },
    )
