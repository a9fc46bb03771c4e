"""Third-party clients, each in an environment of its own, against a running server."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.serve import RunningServer

pytestmark = pytest.mark.ecosystem

CLIENTS = Path(__file__).parent / "clients"
ROOT = Path(__file__).parent.parent.parent
SECONDS = 300


def run_cases(command: Sequence[str]) -> None:
    """Run a client script; what it printed is the failure's message."""
    # huggingface_hub, told to stay offline, refuses a server on this machine too.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=CLIENTS,
        env=environment,
        check=False,
    )
    assert "passed " in answer.stdout, answer.stdout + answer.stderr
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize("name", ["openai", "huggingface_hub", "text_generation"])
def test_python_client(server: RunningServer, name: str) -> None:
    python = ROOT / ".venvs" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no .venvs/{name}: make test-ecosystem makes it")
    run_cases([str(python), f"{name}_client.py", server.url])


@pytest.mark.parametrize("name", ["openai", "huggingface"])
def test_javascript_client(server: RunningServer, name: str) -> None:
    node = shutil.which("node")
    if node is None or not (CLIENTS / "js" / "node_modules" / ".package.json").exists():
        pytest.skip("node or its packages are missing: make test-ecosystem installs them")
    run_cases([node, f"js/{name}_client.mjs", server.url])
