"""README and RESULTS show the recorded speeds, and no others."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from bench import figures
from bench.figures import (
    LEVELS,
    MACHINES,
    main,
    newest,
    outdated,
    table,
)
from bench.harness.paths import BENCH
from bench.harness.repeats import figure

from millrace.charts.lines import Panel, curves, round_numbers


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


def test_an_outdated_page_fails_the_check_and_is_rewritten(
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


SVG = "{http://www.w3.org/2000/svg}"


def points(document: ET.Element) -> list[list[tuple[float, float]]]:
    """The corners of every line."""
    return [
        [corner_of(text) for text in line.attrib["points"].split()]
        for line in document.iter(f"{SVG}polyline")
    ]


def corner_of(text: str) -> tuple[float, float]:
    """From `x,y`."""
    x, y = text.split(",")
    return float(x), float(y)


def test_lines_keep_proportions_and_doublings_are_evenly_apart() -> None:
    panel = Panel(
        title="a < b",
        points={"ours": [(1, 10), (2, 20), (8, 40)], "theirs": [(1, 5), (8, 5)]},
        x_title="clients",
        doubles=True,
    )
    ours, theirs = points(ET.fromstring(curves("t & u", [panel])))
    (x1, y1), (x2, y2), (x3, y3) = ours
    assert x3 - x2 == pytest.approx(2 * (x2 - x1), abs=0.3)
    floor = y3 + 4 * (y1 - y3) / 3
    assert floor - y2 == pytest.approx((floor - y3) / 2, abs=0.3)
    assert floor - theirs[0][1] == pytest.approx((floor - y3) / 8, abs=0.3)
    assert [x for x, _ in theirs] == [x1, x3]


@pytest.mark.parametrize(
    ("low", "high", "doubles", "numbers"),
    [
        (0.3, 12.0, True, [0.5, 1, 2, 5, 10]),
        (1.0, 2.0, True, [1, 2]),
        (90.0, 1480.0, False, [200, 400, 600, 800, 1000, 1200, 1400]),
        (0.0, 1.0, False, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        (3.0, 3.0, False, [3]),
    ],
)
def test_round_numbers_lie_between_the_ends(
    low: float, high: float, doubles: bool, numbers: list[float]
) -> None:
    assert round_numbers(low, high, doubles=doubles) == pytest.approx(numbers)
