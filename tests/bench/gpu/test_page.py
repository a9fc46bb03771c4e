"""The results of a run: the page, its JSON, and what makes a run whole."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gpu import goals
from bench.gpu.children import Ended
from bench.gpu.figures import Figure, check, unchecked
from bench.gpu.page import NO_GPU, Results
from bench.gpu.plan import Stage

FIRST = Stage("checks.first", "Is it first?", 1, 1)
SECOND = Stage("checks.second", "Is it second?", 1, 1)
DECODE = Figure(name="d", kind=goals.DECODE, value=4.5, unit="ms", detail={"bytes": 16e9})
LIMITS = [Figure(name="r", kind=goals.READ_RATE, value=4000.0, unit="GB/s")]
IDLE = Figure(
    name="device idle, batch 32",
    kind=goals.ACTIVITY,
    value=12.5,
    unit="%",
    detail={"launches": 3.0, "copies": 2.0, "waits": 0.5, "sampling_share": 0.25},
)


def results(folder: Path, *figures: Figure, device: str = "cuda") -> Results:
    """The results of one stage."""
    found = Results(folder, device=device, shape="8b")
    found.add(FIRST, Ended("ok", 3.0, ()), figures)
    return found


def test_results_are_on_disk_after_every_stage(tmp_path: Path) -> None:
    found = results(tmp_path, *LIMITS)
    assert json.loads(found.json_path.read_text())["figures"][0]["value"] == 4000.0
    was_whole = found.is_whole
    found.add(SECOND, Ended("failed", 1.0, ("Traceback", "ValueError: no")), [*LIMITS, DECODE])
    assert (was_whole, found.is_whole) == (True, False)
    content = json.loads(found.json_path.read_text())
    assert content["stages"]["second"]["tail"] == ["Traceback", "ValueError: no"]
    assert content["speeds"][0]["verdict"] == "met"
    page = found.page_path.read_text()
    assert "ValueError: no" in page
    # 16 GB at 4000 GB/s are 4 ms.
    assert "88.9%" in page


def test_the_page_names_each_stage_with_its_end_and_its_figures(tmp_path: Path) -> None:
    found = results(tmp_path, *LIMITS)
    found.add(SECOND, Ended("timed out", 7.0, ()), [*LIMITS, DECODE, IDLE])
    rows = [line.split("|") for line in found.text().splitlines() if line.startswith("| ")]
    stages = [tuple(cell.strip() for cell in row[1:-1]) for row in rows[1:3]]
    assert stages == [
        ("first", "Is it first?", "ok", "3 s", "1"),
        ("second", "Is it second?", "timed out", "7 s", "2"),
    ]


def test_a_page_without_a_gpu_says_so_and_has_no_speeds(tmp_path: Path) -> None:
    found = results(tmp_path, *LIMITS, DECODE, device="cpu")
    assert NO_GPU in found.text()
    assert "88.9%" not in found.text()
    assert json.loads(found.json_path.read_text())["is_of_a_gpu"] is False
    page = results(tmp_path, *LIMITS, DECODE).text()
    assert NO_GPU not in page
    assert "88.9%" in page


def test_a_run_in_which_a_check_is_missed_is_not_whole(tmp_path: Path) -> None:
    assert results(tmp_path, check("a", 0.5, "x", most=0.5), unchecked("b", "no tool")).is_whole
    assert not results(tmp_path, check("a", 0.6, "x", most=0.5)).is_whole
    assert not results(tmp_path, check("a", float("nan"), "x", most=0.5)).is_whole


def test_a_goal_of_speed_that_is_missed_leaves_the_run_whole(tmp_path: Path) -> None:
    slow = Figure(name="d", kind=goals.DECODE, value=45.0, unit="ms", detail={"bytes": 16e9})
    found = results(tmp_path, *LIMITS, slow)
    assert "missed" in found.text()
    assert found.is_whole


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    found = results(tmp_path, check("a", float("inf"), "x"))
    assert json.loads(found.json_path.read_text())["figures"][0]["value"] is None


def test_what_a_step_does_is_in_a_table(tmp_path: Path) -> None:
    assert (
        "| batch 32 | 12.5% | 3        | 2      | 0.5   | 25.0%    |"
        in results(tmp_path, IDLE).text()
    )
