"""What `make serve` starts and says, without running it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from millrace_launcher.arguments import read_settings

ROOT = Path(__file__).parent.parent.parent


def plan(*arguments: str) -> list[str]:
    """The commands that make would run."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MODEL", "PORT", "ARGS", "MODEL_ID")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    answer = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "model", "port"),
    [
        ((), None, 3000),
        (("MODEL=a/b", "PORT=81"), "a/b", 81),
        (("ARGS=--model-id=a/c --port 82",), "a/c", 82),
    ],
)
def test_serve(
    arguments: tuple[str, ...], model: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_ID", raising=False)
    words = shlex.split(plan("serve", *arguments)[-1])
    settings = read_settings(words[words.index(".venv/bin/millrace-launcher") + 1 :])
    assert (settings.launcher.model_id, settings.router.port) == (model, port)


def test_installing_says_so_first() -> None:
    lines = plan("install", "--always-make")
    said = next(i for i, line in enumerate(lines) if "Installing Millrace into .venv" in line)
    assert "pip install" in " ".join(lines[said + 1 : said + 3])
