"""Cases: their figures from known timelines, their prompts, the room they ask for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from bench.comparison.cases import BATCH, CASES, Case, Figure
from bench.comparison.offline import Row
from bench.comparison.report import Results
from bench.comparison.roofline import Machine, batch_seconds, decode_step_seconds, prefill_seconds
from bench.harness.checkpoints import SHAPES, Shape, build_tokenizer
from bench.harness.repeats import Sample

from millrace.load.levels import closed
from millrace.load.measurement import Timeline, summarise

TIMELINES = [Timeline(1.0, [1.5, 1.6, 1.8]), Timeline(1.0, [1.7, 1.9, 2.0])]


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        (Figure.PER_TOKEN, 1000 * (0.1 + 0.2 + 0.2 + 0.1) / 4),
        (Figure.FIRST_TOKEN, 600.0),
        (Figure.RATE, 6.0),
    ],
)
def test_figures_match_known_timelines(figure: Figure, value: float) -> None:
    case = Case("x", figure, ((4, 3), (4, 3)))
    assert case.value(TIMELINES) == pytest.approx(value)


def test_prompts_are_those_of_the_load_level_of_the_same_name() -> None:
    tokenizer = build_tokenizer(18_600)
    level = closed(32, 128, 128, rounds=1)
    assert level.name == BATCH.name
    texts = [tokenizer.decode(r.ids).strip() for r in BATCH.requests(tokenizer)]
    assert texts == list(level.prompts())
    assert all(len(request.ids) == 128 for request in BATCH.requests(tokenizer))


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


TINY = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=18_600,
)


def test_a_batch_is_its_steps() -> None:
    machine = Machine(read_one=1e9, read_all=2e9, multiply=1e11, threads=2)
    expected = prefill_seconds(TINY, machine, [4, 4])
    expected += decode_step_seconds(TINY, machine, [5, 5])
    expected += decode_step_seconds(TINY, machine, [6])
    assert batch_seconds(TINY, machine, [(4, 3), (4, 2)]) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "step_ms", "prefill_ms"), [("135m", 8.6, 134), ("1b", 68, 1085)])
def test_known_shapes_on_a_known_machine_have_the_expected_times(
    name: str, step_ms: float, prefill_ms: float
) -> None:
    """30.5 GB/s and 1.9 TFLOP/s: figures that were worked out apart from this code."""
    machine = Machine(read_one=15.6e9, read_all=30.5e9, multiply=1.9e12, threads=2)
    shape = SHAPES[name]
    assert 1000 * decode_step_seconds(shape, machine, [192]) == pytest.approx(step_ms, rel=0.05)
    assert 1000 * prefill_seconds(shape, machine, [1024]) == pytest.approx(prefill_ms, rel=0.02)
