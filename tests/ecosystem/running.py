"""Runs the programs of others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

SECONDS = 900
"""The first prompt of an agent takes minutes on a slow processor."""
QUIET = {
    "AIDER_ANALYTICS": "false",
    "DO_NOT_TRACK": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""Keeps programs from asking servers of their makers for anything."""


def run_quietly(command: Sequence[str], folder: Path, **environment: str) -> str:
    """The output of a command that succeeds; a failure's message has the output too."""
    # huggingface_hub, told to stay offline, refuses a server on this machine too.
    usual = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=folder,
        env={**usual, **QUIET, **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def run_cases(command: Sequence[str], folder: Path, **environment: str) -> None:
    """Run a script of cases."""
    said = run_quietly(command, folder, **environment)
    assert "passed " in said, said
