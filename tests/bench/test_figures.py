"""README and RESULTS show the recorded speeds, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import figures
from bench.figures import (
    LEVELS,
    MACHINES,
    MissingFigureError,
    Served,
    main,
    newest,
    outdated,
    table,
    with_table,
)
from bench.harness.paths import BENCH, RESULTS_FOLDER
from bench.harness.repeats import figure


def test_pages_have_the_recorded_figures() -> None:
    assert outdated() == {}, "run python -m bench.figures"
    assert main(["--check"]) == 0


def test_the_goal_names_the_same_figures() -> None:
    ours = newest(MACHINES[0])
    goal = " / ".join(figure(ours[level]) for level in LEVELS.values())
    assert (
        f"| 135M served, c=1 / 8 / 32, tokens/s | 75 / 480 / 1000 | {goal} |"
        in (BENCH / "RESULTS.md").read_text()
    )


def test_the_runs_are_the_newest_of_their_levels() -> None:
    for served in MACHINES:
        assert list(served.runs) == sorted(served.runs)
        assert all((RESULTS_FOLDER / f"{run}.json").exists() for run in served.runs)


def test_a_page_that_differs_is_found_and_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures -->\n| old |\n<!-- /figures -->\nafter\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "outdated", lambda: outdated({page: "runs"}))
    assert main(["--check"]) == 1
    assert "| old |" in page.read_text()
    assert main([]) == 0
    expected = f"before\n<!-- figures -->\n{table('runs')}<!-- /figures -->\nafter\n"
    assert page.read_text() == expected
    assert main(["--check"]) == 0


@pytest.mark.parametrize("page", ["", "<!-- figures -->\n", "<!-- /figures -->"])
def test_a_page_needs_both_markers(page: str) -> None:
    with pytest.raises(MissingFigureError, match="<!-- figures -->"):
        with_table(page, "runs")


def test_a_machine_needs_every_level() -> None:
    with pytest.raises(MissingFigureError, match="c=32"):
        newest(Served("x", MACHINES[0].runs[1:], ""))
