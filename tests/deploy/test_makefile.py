"""The commands of make's verbs, and their descriptions."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from millrace_launcher.settings.arguments import read_settings

ROOT = Path(__file__).parent.parent.parent


def plan(*arguments: str) -> list[str]:
    """The commands that make would run."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MODEL", "PORT", "ARGS", "MODEL_ID", "SUITE")
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
def test_make_serve_passes_model_and_port_to_the_launcher(
    arguments: tuple[str, ...], model: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL_ID", raising=False)
    words = shlex.split(plan("serve", *arguments)[-1])
    settings = read_settings(words[words.index(".venv/bin/millrace-launcher") + 1 :])
    assert (settings.launcher.model_id, settings.router.port) == (model, port)


def test_make_install_announces_itself_first() -> None:
    lines = plan("install", "--always-make")
    said = next(i for i, line in enumerate(lines) if "Installing Millrace into .venv" in line)
    assert "pip install" in " ".join(lines[said + 1 : said + 3])


def test_torch_index_reaches_the_program_that_chooses() -> None:
    install = next(line for line in plan("install", "--always-make") if "pip install" in line)
    assert 'PIP_EXTRA_INDEX_URL="$(.venv/bin/python tools/torch_index.py)"' in install


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("SUITE=long",), ["-m long"]),
        (("SUITE=long ecosystem",), ["-m long", "-m ecosystem"]),
        ((), ["-m long", "-m ecosystem", "-m cluster", "fuzz_files 100000"]),
    ],
)
def test_suites_run_in_order(arguments: tuple[str, ...], words: list[str]) -> None:
    text = "\n".join(plan("test-all", *arguments))
    places = [text.find(word) for word in words]
    assert -1 not in places
    assert places == sorted(places)
    assert text.count(" -m long ") + text.count(" -m cluster ") <= len(words)


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refusal:
        plan("test-all", "SUITE=lang")
    assert "SUITE=lang is not a suite: use long ecosystem cluster fuzz" in refusal.value.stderr


def test_make_clean_removes_ignored_files_except_environments() -> None:
    kept = {".venv", ".venvs", "node_modules", "bench/.peers", "*.egg-info", "*.so"}
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()}
    cleaned = " ".join(plan("clean"))
    assert [name for name in sorted(ignored - kept) if name not in cleaned] == []


def test_help_names_every_verb_and_contributing_points_to_it() -> None:
    makefile = (ROOT / "Makefile").read_text()
    verbs = set(makefile.partition(".PHONY:")[2].partition("\n")[0].split()) - {"help"}
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert {verb for verb in verbs if f'"make {verb} ' not in makefile} == set()
    assert "`make help`" in contributing


def test_each_test_that_is_marked_long_is_in_the_long_suite() -> None:
    (line,) = (line for line in plan("suite-long") if " -m long " in line)
    folders = [ROOT / word for word in shlex.split(line) if word.startswith("tests/")]
    marked = {path for path in ROOT.glob("tests/**/test_*.py") if "mark.long" in path.read_text()}
    marked -= {Path(__file__), ROOT / "tests/shard/kernels/cpu/test_sanitizers.py"}
    assert marked
    assert [path for path in marked if not any(path.is_relative_to(one) for one in folders)] == []
