"""systemd reads the unit, and Kubernetes's own types the Deployment."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.ecosystem import prepare

pytestmark = pytest.mark.ecosystem

DEPLOY = prepare.ROOT / "deploy"
PROGRAM = "/opt/millrace/.venv/bin/millrace-launcher"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "millrace.service").read_text()
    assert PROGRAM in text
    # It demands that the program is there.
    unit = tmp_path / "millrace.service"
    unit.write_text(text.replace(PROGRAM, "/bin/true"))
    checked = subprocess.run(
        [program, "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_kubernetes_types_accept_the_manifest() -> None:
    python = prepare.interpreter("kubernetes")
    if python is None:
        pytest.skip("no environment for kubernetes: make test-all SUITE=ecosystem makes it")
    script = prepare.CLIENTS / "kubernetes_manifest.py"
    checked = subprocess.run(
        [python, script, DEPLOY / "kubernetes" / "millrace.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.split() == ["passed", "Deployment", "passed", "Service"]
