"""The preparation of the ecosystem tests installs packages, or says why it must not."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.ecosystem import prepare

CLIENTS = prepare.CLIENTS
DOCUMENT = prepare.ROOT / "docs" / "clients.md"


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have run on a machine with apt-get and nothing else."""
    found: list[list[str]] = []

    def run(command: Sequence[str], **_: object) -> bool:
        found.append(list(command))
        return True

    monkeypatch.setattr(prepare, "_run", run)
    monkeypatch.setattr(
        shutil, "which", lambda name, **_: f"/{name}" if name == "apt-get" else None
    )
    return found


def test_root_installs_missing_programs(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    prepare.prepare_programs()
    installed = {command[-1] for command in commands if command[1] == "install"}
    assert installed >= {"g++", "prometheus", "docker-compose"}


def test_other_users_get_a_list_of_missing_programs(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    prepare.prepare_programs()
    assert commands == []
    said = capsys.readouterr().out
    assert "prometheus" in said
    assert "docker-compose" in said


def test_without_node_the_javascript_clients_are_named_as_skipped(
    commands: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "js").mkdir()
    (tmp_path / "js" / "package.json").write_text("{}")
    monkeypatch.setattr(prepare, "VENVS", tmp_path / "none")
    prepare.prepare_node(tmp_path / "js", "JavaScript clients")
    assert commands == []
    assert "the tests of JavaScript clients skip" in capsys.readouterr().out


def test_an_environment_is_made_once_for_the_same_pins(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pins = tmp_path / "client.txt"
    pins.write_text("client==1.0\n")
    monkeypatch.setattr(prepare, "VENVS", tmp_path)
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "requirements.txt").write_text("client==1.0\n")
    prepare.prepare_venv(pins)
    assert commands == []


def test_an_environment_that_was_not_installed_to_its_end_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(prepare, "VENVS", tmp_path)
    monkeypatch.setattr(prepare, "_run", lambda command, **_: "venv" in command)
    pins = tmp_path / "client.txt"
    pins.write_text("client==1.0\n")
    prepare.prepare_venv(pins)
    assert prepare.interpreter("client") is None


def test_the_documented_versions_are_those_installed() -> None:
    pins = [*prepare.REQUIREMENTS.glob("*.txt"), *prepare.AGENTS.glob("requirements/*.txt")]
    lines = "".join(file.read_text() for file in pins)
    pinned = set(re.findall(r"^([\w-]+)(?:\[.*?\])?==(.+)$", lines, re.MULTILINE))
    agents = [prepare.AGENTS / name for name in prepare.CODING_AGENTS]
    for folder in (CLIENTS / "js", *agents):
        pinned |= json.loads((folder / "package.json").read_text())["dependencies"].items()
    rows = re.findall(r"^\| [^`|]*(`.*?) \| ([\d., ]+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) > 10
    for clients, numbers in rows:
        named = zip(re.findall("`(.+?)`", clients), numbers.split(", "), strict=True)
        assert set(named) <= pinned, clients
