"""The chat page and the documentation in headless Chromium, against a running server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from bench.harness.server import RunningServer
from tests.ecosystem.running import run_cases
from tests.ecosystem.test_clients import CLIENTS, MODULES

pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ("pages/pages_cases.py", "pages/conversations_cases.py", "pages/docs_cases.py")
SHARED = ROOT / "router" / "millrace_router" / "api" / "pages" / "shared"
MOST_STEPS_PER_KILOBYTE = 250_000
PYTHON = ROOT / ".venvs" / "pages" / "bin" / "python"


@pytest.fixture
def browser_python() -> Path:
    """The interpreter that drives Chromium."""
    if not PYTHON.exists() or shutil.which("chromium") is None:
        pytest.skip("no .venvs/pages or no chromium: make test-all SUITE=ecosystem brings them")
    return PYTHON


@pytest.mark.parametrize("script", SCRIPTS)
def test_pages_pass_their_cases_in_a_browser(
    server: RunningServer, browser_python: Path, script: str
) -> None:
    run_cases([str(browser_python), script, server.url], CLIENTS, **MODULES)


def test_screenshots_can_be_made_anew(
    server: RunningServer, browser_python: Path, tmp_path: Path
) -> None:
    run_cases(
        [str(browser_python), "pages/screenshots.py", server.url, str(tmp_path)], CLIENTS, **MODULES
    )
    made = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    kept = {file.name for file in (ROOT / "docs" / "images").glob("*.png")}
    assert kept <= made.keys()
    assert all(0 < made[name] < 200_000 for name in kept)


def test_the_highlighter_is_the_published_one() -> None:
    """Each component as the package has it, in the order that the file's head names, with the licence."""
    package = CLIENTS / "js" / "node_modules" / "prismjs"
    if not (package / "package.json").exists():
        pytest.skip("no prismjs in node_modules: make test-all SUITE=ecosystem brings it")
    shipped = (SHARED / "prism.js").read_text()
    head, _, code = shipped.partition("*/\n")
    names = head.splitlines()[2].split()
    assert f"Prism {json.loads((package / 'package.json').read_text())['version']}," in head
    assert (package / "LICENSE").read_text().strip() in head
    parts = [(package / "components" / f"prism-{name}.min.js").read_text() for name in names]
    assert code.partition("\n")[2] == "\n".join(parts) + "\n"


@pytest.fixture(scope="module")
def markdown() -> dict[str, Any]:
    """What the Markdown of the pages makes of some texts, and the steps for hostile ones."""
    if shutil.which("node") is None:
        pytest.skip("no node: make test-all SUITE=ecosystem brings it")
    script = CLIENTS / "pages" / "markdown.mjs"
    answer = subprocess.run(
        ["node", str(script), str(SHARED)], capture_output=True, text=True, timeout=300, check=True
    )
    made: dict[str, Any] = json.loads(answer.stdout)
    return made


def test_markdown_and_formulas_become_the_elements_that_are_meant(markdown: dict[str, Any]) -> None:
    assert markdown["wrong"] == []


def test_the_work_for_hostile_markdown_grows_as_its_text(markdown: dict[str, Any]) -> None:
    """Steps for 9 000 and for 18 000 characters of each; the square of the text would be four times as many."""
    assert len(markdown["work"]) > 30
    steep = {name: work for name, work in markdown["work"].items() if work[1] > 2.5 * work[0]}
    assert steep == {}
    most = max(steps for _, steps in markdown["work"].values())
    assert most < 18 * MOST_STEPS_PER_KILOBYTE
