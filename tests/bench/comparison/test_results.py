"""The tables and the figures of a run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bench.comparison.cases import BATCH, CASES
from bench.comparison.offline import Row
from bench.comparison.report import Results, served_against_offline, text
from bench.comparison.roofline import Machine, decode_step_seconds
from bench.harness.checkpoints import SHAPES
from bench.harness.repeats import Sample

from millrace.load.levels import closed
from millrace.load.measurement import Timeline, summarise

MACHINE = Machine(read_one=15e9, read_all=30e9, multiply=1.9e12, threads=2)


@pytest.fixture
def results() -> Results:
    single = CASES["135m"][0]
    batch = closed(32, 128, 128, rounds=1)
    timelines = [Timeline(0.0, [0.1 + 0.04 * i for i in range(128)]) for _ in range(32)]
    ours = summarise("millrace", batch, timelines)
    return Results(
        model="135m",
        machine=MACHINE,
        rows=[
            Row(single, "millrace", [Sample(12.0, 0.0), Sample(11.0, 0.0), Sample(90.0, 1.0)]),
            Row(single, "vllm", [Sample(23.0, 0.5)]),
            Row(BATCH, "millrace", [Sample(2 * ours.tokens_per_second, 0.0)]),
        ],
        measurements=[ours, replace(ours, server="vllm", tokens_per_second=100.0)],
        notes=["openvino took no further part"],
    )


def test_the_tables_have_ratios_marks_and_the_distance_to_the_roofline(results: Results) -> None:
    shown = text(results)
    rows = [[cell.strip() for cell in line.split("|")] for line in shown.splitlines()]
    ours = next(row for row in rows if row[1:3] == ["one stream", "millrace"])
    theirs = next(row for row in rows if row[1:3] == ["one stream", "vllm"])
    floor = 1000 * decode_step_seconds(SHAPES["135m"], MACHINE, [192])
    assert ours[4:7] == ["11.5", "12.0 11.0 ~90.0", ""]
    assert ours[8] == f"{100 * floor / 11.5:.0f} %"
    assert theirs[4:7] == ["~23.0", "~23.0", "~2.00"]
    assert "Note: openvino took no further part" in shown


def test_served_against_offline_is_on_the_same_requests(results: Results) -> None:
    (line,) = served_against_offline(results)
    assert line.startswith("millrace:")
    assert line.endswith("ratio 0.50.")


def test_figures_are_medians_and_quantiles(results: Results) -> None:
    results.measurements = [*results.measurements, results.measurements[0]]
    content = json.loads(json.dumps(results.figures()))
    ours = content["offline"][0]
    assert (ours["median"], ours["least"], ours["most"], ours["repeats"]) == (11.5, 11.0, 90.0, 3)
    assert ours["other_cores"] == 1.0
    first, second = content["measurements"]
    assert (first["server"], first["tokens_per_second"]["repeats"]) == ("millrace", 2)
    assert (second["server"], second["tokens_per_second"]["median"]) == ("vllm", 100.0)
    assert first["between_tokens_ms"]["p50"] == pytest.approx(40.0)
