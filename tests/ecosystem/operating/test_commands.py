"""Commands of other programs on the pages for operators have flags that these programs know."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence

import pytest
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
def test_its_flags_are_known(words: list[str]) -> None:
    # docker's global flags come before its command, and a program's own after the image.
    if words[:2] == ["docker", "run"]:
        words = words[: words.index("millrace")]
    assert unknown_flags(words[1:], help_of(words)) == []
