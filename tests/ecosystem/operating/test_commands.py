"""Commands of other programs on the pages for operators have flags that these programs know."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.ecosystem import prepare
from tests.ecosystem.prepare import ROOT
from tests.test_docs import commands, shell_blocks, unknown_flags

pytestmark = pytest.mark.ecosystem

PAGES = ("operate", "monitoring", "kubernetes")
HELP = {
    "kubectl": (
        *("create secret generic", "create namespace", "apply", "port-forward"),
        *("rollout status", "rollout undo", "set image"),
    ),
    "docker": ("build", "run"),
    "systemctl": ("",),
    "journalctl": ("",),
    "useradd": ("",),
    "install": ("",),
    "grep": ("",),
    "curl": ("--help all",),
}
"""Programs, and their commands whose `--help` has the flags."""


def without_namespace(words: list[str]) -> list[str]:
    """A command of kubectl without its global flag in front."""
    return [words[0], *words[3:]] if words[:2] == ["kubectl", "-n"] else words


CALLS = [
    words
    for page in PAGES
    for block in shell_blocks((ROOT / "docs" / f"{page}.md").read_text())
    for words in map(without_namespace, commands(block))
    # Compose may be a program of its own; `test_compose.py` has it read the profiles.
    if words[0] in HELP and words[1] != "compose"
]


def help_of(words: Sequence[str]) -> str:
    """What the program says of the command; skips the test where the program is missing."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    begins = [found for found in HELP[words[0]] if " ".join(words[1:]).startswith(found)]
    command = begins[0].split() if begins else HELP[words[0]][0].split()
    if "--help" not in command:
        command.append("--help")
    answer = subprocess.run([words[0], *command], capture_output=True, text=True, check=False)
    return answer.stdout + answer.stderr


@pytest.mark.parametrize("words", CALLS, ids=" ".join)
def test_every_flag_of_a_documented_command_is_known(words: list[str]) -> None:
    # docker's global flags come before its command, and a program's own after the image.
    if words[:2] == ["docker", "run"]:
        words = words[: words.index("millrace")]
    assert unknown_flags(words[1:], help_of(words)) == []


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
