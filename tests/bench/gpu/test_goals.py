"""From figures to checks and goals, and figures on disk."""

from __future__ import annotations

import math
from pathlib import Path

from bench.gpu import goals
from bench.gpu.figures import Figure, append, check, read, unchecked

LIMITS = [
    Figure(name="r", kind=goals.READ_RATE, value=3000.0, unit="GB/s"),
    Figure(name="c", kind=goals.COPY_RATE, value=4000.0, unit="GB/s"),
    Figure(name="m", kind=goals.MATRIX_RATE, value=800.0, unit="TFLOP/s"),
]


def verdicts(figures: list[Figure]) -> dict[str, tuple[str, str]]:
    lines = [*goals.checks(figures), *goals.speeds(figures)]
    return {line.case: (line.reached, line.verdict) for line in lines}


def decode(milliseconds: float) -> Figure:
    return Figure(
        name="d", kind=goals.DECODE, value=milliseconds, unit="ms", detail={"bytes": 16e9}
    )


def test_a_decode_is_held_against_the_faster_of_reading_and_copying() -> None:
    # 16 GB at 4000 GB/s are 4 ms.
    assert verdicts([*LIMITS, decode(4.5)])["d"] == ("88.9%", "met")
    assert verdicts([*LIMITS, decode(5.0)])["d"] == ("80.0%", "missed")
    assert verdicts([decode(4.5)])["d"] == ("", "not measured")


def test_a_prefill_is_held_against_the_matrix_rate() -> None:
    # 240 TFLOP at 800 TFLOP/s are 300 ms.
    def prefill(milliseconds: float) -> Figure:
        return Figure(
            name="p", kind=goals.PREFILL, value=milliseconds, unit="ms", detail={"flops": 240e12}
        )

    assert verdicts([*LIMITS, prefill(400.0)])["p"] == ("75.0%", "met")
    assert verdicts([*LIMITS, prefill(500.0)])["p"] == ("60.0%", "missed")


def test_ratios_need_both_sides() -> None:
    engine = Figure(name="e", kind=goals.ENGINE, value=1000.0, unit="tok/s")
    server = Figure(name="s", kind=goals.SERVER, value=930.0, unit="tok/s")
    peer = Figure(name="t", kind=goals.PEER, value=600.0, unit="tok/s")
    found = verdicts([engine, server, peer])
    assert found["server against engine"] == ("0.930 x", "met")
    assert found["engine against transformers"] == ("1.667 x", "missed")
    assert verdicts([server, peer])["server against engine"] == ("", "not measured")


def test_what_was_not_measured_is_in_the_table_all_the_same() -> None:
    lines = [*goals.checks([]), *goals.speeds([])]
    assert {line.verdict for line in lines} == {"not measured"}
    assert len(lines) == 6


def test_a_check_holds_up_to_its_bound() -> None:
    found = {
        figure.name: goals.checks([figure])[0].verdict
        for figure in (
            check("at the bound", 0.5, "x", most=0.5),
            check("above it", 0.51, "x", most=0.5),
            check("not a number", math.nan, "x", most=0.5),
            unchecked("not made", "no tool"),
        )
    }
    assert found == {
        "at the bound": "met",
        "above it": "missed",
        "not a number": "missed",
        "not made": "not measured",
    }
    assert goals.checks([unchecked("not made", "no tool")])[0].measured == "no tool"


def verdict_on_tests(status: float, *, failed: int = 0, skipped: int = 0) -> str:
    detail = {"summary": "", "failed": failed, "skipped": skipped}
    figure = Figure(name="GPU tests", kind=goals.TESTS, value=status, unit="", detail=detail)
    return verdicts([figure])["GPU tests"][1]


def test_tests_that_time_cut_off_are_neither_passed_nor_failed() -> None:
    found = [verdict_on_tests(status) for status in (0, 1, goals.STOPPED)]
    assert found == ["met", "missed", "not measured"]


def test_a_test_that_failed_before_time_ended_is_a_goal_missed() -> None:
    assert verdict_on_tests(goals.STOPPED, failed=1) == "missed"


def test_tests_that_were_skipped_meet_no_goal() -> None:
    assert verdict_on_tests(0, skipped=82) == "not measured"
    # Whatever made pytest fail without a failed test is no pass either.
    assert verdict_on_tests(2, skipped=82) == "missed"


def test_figures_are_kept_when_their_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    assert read(path) == []
    append(path, decode(4.0))
    append(path, decode(5.0))
    append(path, LIMITS[0])
    with path.open("a") as file:
        file.write('{"name": "half')
    assert read(path) == [decode(5.0), LIMITS[0]]
