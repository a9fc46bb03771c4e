"""Charts: well-formed documents in which lengths are in proportion to values."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from millrace.charts.lines import Panel, curves, round_numbers

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


def test_a_panel_without_points_and_one_with_a_single_point_are_drawn() -> None:
    empty = Panel(title="x", points={}, x_title="y")
    single = Panel(title="x", points={"ours": [(4, 2)]}, x_title="y", doubles=True)
    assert len(points(ET.fromstring(curves("t", [empty, single])))) == 1


def test_predictions_are_dashed_in_the_colour_of_their_series_on_the_same_scale() -> None:
    panel = Panel(
        title="a",
        points={"ours": [(0, 10), (4, 10)], "theirs": [(0, 20), (4, 20)]},
        simulated={"theirs": [(0, 40), (8, 20)]},
        x_title="x",
    )
    document = ET.fromstring(curves("t", [panel]))
    ours, theirs, dashed = document.iter(f"{SVG}polyline")
    assert [line.attrib.get("stroke-dasharray") for line in (ours, theirs)] == [None, None]
    assert "stroke-dasharray" in dashed.attrib
    assert dashed.attrib["stroke"] == theirs.attrib["stroke"] != ours.attrib["stroke"]
    (_, first), (_, second), ((left, top), (right, last)) = points(document)
    assert first[0] == pytest.approx((left + right) / 2, abs=0.2)
    assert second[1] == last
    assert last - top == pytest.approx(2 * (first[1] - last), abs=0.2)
    circles = [(c.attrib["fill"], c.attrib.get("stroke")) for c in document.iter(f"{SVG}circle")]
    assert circles[-1] == ("#ffffff", theirs.attrib["stroke"])
    assert circles[0] == (ours.attrib["stroke"], None)
    assert "dashed: simulated" in ET.tostring(document, encoding="unicode")


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
