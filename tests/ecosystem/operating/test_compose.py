"""Compose's own reading of docker-compose.yml; no engine is needed for it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parents[3]


def compose() -> list[str]:
    """The command of whichever Compose is installed."""
    if path := shutil.which("docker-compose"):
        return [path]
    docker = shutil.which("docker")
    if docker is not None:
        plugin = [docker, "compose"]
        if subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0:
            return plugin
    pytest.skip("no docker compose: make test-all SUITE=ecosystem installs it where it may")


@pytest.mark.parametrize("profiles", [(), ("split",), ("monitoring",), ("split", "monitoring")])
def test_compose_accepts_the_file(profiles: tuple[str, ...]) -> None:
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    subprocess.run([*compose(), *flags, "config", "--quiet"], cwd=ROOT, check=True)
