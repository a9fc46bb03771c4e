"""Charts: well-formed documents in which lengths are in proportion to values."""

from __future__ import annotations

import random
from xml.etree import ElementTree as ET

import pytest
from bench.profile.flames import Event, Frame, flame_graph, own_times, tree

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


def test_events_become_a_tree_by_what_holds_them() -> None:
    events = [
        Event("step", 0.0, 10.0),
        Event("layer", 1.0, 3.0),
        Event("linear", 1.5, 1.0, is_operator=True),
        Event("layer", 4.0, 4.0),
        Event("linear", 4.0, 4.0, is_operator=True),
        Event("step", 10.0, 5.0),
    ]
    root = tree("all", events)
    assert root.total == 15.0
    step = root.children["step"]
    assert (step.total, step.own) == (15.0, 8.0)
    layer = step.children["layer"]
    assert (layer.total, layer.own) == (7.0, 2.0)
    assert layer.children["linear"].is_operator
    assert own_times(root) == {"step": 8.0, "linear": 5.0, "layer": 2.0, "all": 0.0}
    assert root.scaled(0.5).children["step"].children["layer"].total == 3.5


def test_own_times_sum_to_the_whole_even_where_clocks_disagree() -> None:
    generator = random.Random(0)
    events = [Event("root", 0.0, 100.0)]
    events += [
        Event(generator.choice("abc"), generator.uniform(0, 99), generator.uniform(0, 30))
        for _ in range(50)
    ]
    root = tree("all", events)
    assert sum(own_times(root).values()) == pytest.approx(root.total)
    assert all(us >= -1e-9 for us in own_times(root).values())


def test_a_flame_graph_draws_frames_as_wide_as_they_are_long() -> None:
    linear = Frame("linear <32x576>", 60.0, is_operator=True)
    root = Frame("step", 100.0, children={"linear": linear, "norm": Frame("norm", 0.01)})
    document = ET.fromstring(flame_graph("One step", root, ["a note"]))
    frames = {
        frame.findtext(f"{SVG}title"): float(frame.attrib["width"])
        for frame in document.iter(f"{SVG}rect")
        if frame.findtext(f"{SVG}title")
    }
    assert list(frames) == ["step: 100 µs, 100.0 %", "linear <32x576>: 60 µs, 60.0 %"]
    whole, part = frames.values()
    assert part / whole == pytest.approx(0.6, abs=0.01)
