"""What is installed for the ecosystem tests, and what is said where that is not allowed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import pytest
from tests.ecosystem import prepare


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have run on a machine with apt-get and nothing else."""
    found: list[list[str]] = []

    def run(command: Sequence[str], **_: object) -> bool:
        found.append(list(command))
        return True

    monkeypatch.setattr(prepare, "_run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/{name}" if name == "apt-get" else None)
    return found


def test_root_installs_node_and_npm(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    prepare.prepare_programs()
    installed = {command[-1] for command in commands if command[1] == "install"}
    assert installed >= {"nodejs", "npm", "g++", "prometheus"}


def test_others_are_told_what_is_missing(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    prepare.prepare_programs()
    assert commands == []
    said = capsys.readouterr().out
    assert "nodejs" in said
    assert "npm" in said
