"""The chat page and the documentation in headless Chromium, against a running server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from bench.harness.server import RunningServer
from tests.ecosystem.test_clients import CLIENTS, run_cases

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ("pages/pages_cases.py", "pages/conversations_cases.py", "pages/docs_cases.py")
PYTHON = ROOT / ".venvs" / "pages" / "bin" / "python"


@pytest.fixture
def browser_python() -> Path:
    """The interpreter that drives Chromium."""
    if not PYTHON.exists() or shutil.which("chromium") is None:
        pytest.skip("no .venvs/pages or no chromium: make test-all SUITE=ecosystem brings them")
    return PYTHON


@pytest.mark.parametrize("script", SCRIPTS)
def test_pages_in_a_browser(server: RunningServer, browser_python: Path, script: str) -> None:
    run_cases([str(browser_python), script, server.url])


def test_screenshots_can_be_made_anew(
    server: RunningServer, browser_python: Path, tmp_path: Path
) -> None:
    run_cases([str(browser_python), "pages/screenshots.py", server.url, str(tmp_path)])
    made = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    kept = {file.name for file in (ROOT / "docs" / "images").glob("*.png")}
    assert kept <= made.keys()
    assert all(0 < made[name] < 200_000 for name in kept)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_case_of_the_browser_is_run(script: str) -> None:
    """A function that is not in the list would be no test."""
    source = (CLIENTS / script).read_text()
    listed = source.partition("CASES = [")[2].partition("]")[0].replace(",", " ").split()
    defined = [
        line.removeprefix("def ").partition("(")[0]
        for line in source.splitlines()
        if line.startswith("def ") and line.endswith("(url: str) -> None:")
    ]
    assert listed == defined


def test_the_highlighter_is_the_published_one() -> None:
    """Each component as the package has it, in the order that the file's head names, with the licence."""
    package = CLIENTS / "js" / "node_modules" / "prismjs"
    if not (package / "package.json").exists():
        pytest.skip("no prismjs in node_modules: make test-all SUITE=ecosystem brings it")
    shipped = (ROOT / "router/millrace_router/api/pages/shared/prism.js").read_text()
    head, _, code = shipped.partition("*/\n")
    names = head.splitlines()[2].split()
    assert f"Prism {json.loads((package / 'package.json').read_text())['version']}," in head
    assert (package / "LICENSE").read_text().strip() in head
    parts = [(package / "components" / f"prism-{name}.min.js").read_text() for name in names]
    assert code.partition("\n")[2] == "\n".join(parts) + "\n"
