"""Earlier revisions beside the present one: which files they run, and what git does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.peers import revisions
from bench.peers.revisions import PACKAGES, at_revision, environment_of

COMPILE = "from pathlib import Path\n(Path(__file__).parent / 'generated.py').write_text('')\n"


def git(repository: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=Someone", "-c", "user.email=someone@example.org")
    subprocess.run(["git", "-C", repository, *identity, *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of the four packages; `a_module.VALUE` is 1 in the first, with the tag `old`, and 2 after it."""
    root = tmp_path / "repository"
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
        (root / package / "a_file").touch()
    (root / "proto" / "compile.py").write_text(COMPILE)
    git(root, "init", "--quiet")
    for value, tag in ((1, "old"), (2, "new")):
        (root / "router" / "a_module.py").write_text(f"VALUE = {value}\n")
        git(root, "add", ".")
        git(root, "commit", "--quiet", "--message", tag)
        git(root, "tag", tag)
    monkeypatch.setattr(revisions, "ROOT", root)
    monkeypatch.setattr(revisions, "PEERS_FOLDER", tmp_path / "peers")
    return root


def test_an_earlier_revision_runs_its_own_files(repository: Path, tmp_path: Path) -> None:
    server = at_revision("old")
    folder = tmp_path / "peers" / f"at-{server.name}"
    shown = subprocess.run(
        [sys.executable, "-c", "import a_module; print(a_module.VALUE)"],
        env={**os.environ, **environment_of(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "1\n"
    assert (folder / "proto" / "generated.py").exists()
    assert server.is_installed
    assert at_revision("old").name == server.name != at_revision("new").name


@pytest.mark.usefixtures("repository")
def test_a_revision_that_git_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="git: fatal"):
        at_revision("nonsense")


def test_a_revision_whose_code_cannot_be_generated_leaves_nothing(
    repository: Path, tmp_path: Path
) -> None:
    (repository / "proto" / "compile.py").write_text("raise SystemExit('no compiler')")
    git(repository, "commit", "--quiet", "--all", "--message", "broken")
    with pytest.raises(ValueError, match="no compiler"):
        at_revision("HEAD")
    assert not list((tmp_path / "peers").glob("at-*[0-9a-f]"))
