"""The chat page and the documentation in headless Chromium, against a running server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bench.harness.server import RunningServer
from tests.ecosystem.test_clients import CLIENTS, run_cases

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parent.parent.parent
PYTHON = ROOT / ".venvs" / "pages" / "bin" / "python"


@pytest.fixture
def browser_python() -> Path:
    """The interpreter that drives Chromium."""
    if not PYTHON.exists() or shutil.which("chromium") is None:
        pytest.skip("no .venvs/pages or no chromium: make test-ecosystem brings them")
    return PYTHON


def test_pages_in_a_browser(server: RunningServer, browser_python: Path) -> None:
    run_cases([str(browser_python), "pages_cases.py", server.url])


def test_screenshots_can_be_made_anew(
    server: RunningServer, browser_python: Path, tmp_path: Path
) -> None:
    run_cases([str(browser_python), "screenshots.py", server.url, str(tmp_path)])
    made = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    kept = {file.name for file in (ROOT / "docs" / "images").glob("*.png")}
    assert kept <= made.keys()
    assert all(0 < made[name] < 200_000 for name in kept)


def test_every_case_of_the_browser_is_run() -> None:
    """A function that is not in the list would be no test."""
    source = (CLIENTS / "pages_cases.py").read_text()
    listed = source.partition("CASES = [")[2].partition("]")[0].replace(",", " ").split()
    defined = [
        line.removeprefix("def ").partition("(")[0]
        for line in source.splitlines()
        if line.startswith("def ") and line.endswith("(url: str) -> None:")
    ]
    assert listed == defined
