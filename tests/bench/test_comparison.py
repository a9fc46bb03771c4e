"""Cases: their figures from known timelines, their prompts, the room they ask for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from bench.comparison.cases import BATCH, CASES, Case, Figure, limits_for, ragged, warm_up
from bench.comparison.offline import Row
from bench.comparison.report import Results, served_against_offline
from bench.comparison.roofline import (
    Machine,
    attention_flops,
    batch_seconds,
    cache_bytes,
    decode_step_seconds,
    layer_weights,
    prefill_seconds,
)
from bench.harness.checkpoints import SHAPES, Shape, build_tokenizer, write_checkpoint
from bench.harness.repeats import Sample
from safetensors.torch import load_file

from millrace.load.levels import closed
from millrace.load.measurement import Timeline, summarise

TIMELINES = [Timeline(1.0, [1.5, 1.6, 1.8]), Timeline(1.0, [1.7, 1.9, 2.0])]


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        (Figure.PER_TOKEN, 1000 * (0.1 + 0.2 + 0.2 + 0.1) / 4),
        (Figure.FIRST_TOKEN, 600.0),
        (Figure.RATE, 6.0),
        # Both decode from 1.7 to 1.8, in which the first one gets a token.
        (Figure.DECODE_RATE, 10.0),
    ],
)
def test_figures_of_known_timelines(figure: Figure, value: float) -> None:
    case = Case("x", figure, ((4, 3), (4, 3)))
    assert case.value(TIMELINES) == pytest.approx(value)


def test_streams_that_never_run_together_have_no_joint_rate() -> None:
    apart = [Timeline(1.0, [1.1, 1.2]), Timeline(1.0, [1.3, 1.4])]
    with pytest.raises(ValueError, match="never ran together"):
        Case("x", Figure.DECODE_RATE, ((4, 2), (4, 2))).value(apart)


def test_prompts_are_those_of_the_load_level_of_the_same_name() -> None:
    tokenizer = build_tokenizer(18_600)
    level = closed(32, 128, 128, rounds=1)
    assert level.name == BATCH.name
    texts = [tokenizer.decode(r.ids).strip() for r in BATCH.requests(tokenizer)]
    assert texts == list(level.prompts())
    assert all(len(request.ids) == 128 for request in BATCH.requests(tokenizer))


def test_ragged_lengths_are_uneven_and_always_the_same() -> None:
    lengths = ragged()
    assert lengths == ragged()
    assert len(lengths) == 64
    assert all(16 <= prompt <= 512 and 16 <= new <= 256 for prompt, new in lengths)
    assert len(set(lengths)) > 60


def test_there_is_room_for_what_runs_at_once() -> None:
    cases = [
        Case("a", Figure.RATE, ((10, 5), (20, 5), (30, 5)), concurrency=2),
        Case("b", Figure.RATE, ((100, 1),)),
    ]
    assert cases[0].kv_tokens == 25 + 35
    limits = limits_for(cases, threads=2)
    assert limits.max_tokens > 100 + 4
    assert limits.kv_tokens >= warm_up(cases).kv_tokens > 104
    assert limits.max_streams == 2


@pytest.mark.parametrize("name", CASES)
def test_every_case_has_a_floor_that_gets_better_with_the_machine(name: str) -> None:
    slow = Machine(read_one=1e9, read_all=2e9, multiply=1e11, threads=2)
    fast = Machine(read_one=2e9, read_all=4e9, multiply=2e11, threads=2)
    for case in CASES[name]:
        before, after = case.floor(SHAPES[name], slow), case.floor(SHAPES[name], fast)
        assert math.isfinite(before)
        assert after / before == pytest.approx(2.0 if case.figure.more_is_better else 0.5)


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


TINY = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=18_600,
)
SLOW_MEMORY = Machine(read_one=1.0, read_all=1.0, multiply=math.inf, threads=2)
SLOW_CORES = Machine(read_one=math.inf, read_all=math.inf, multiply=1.0, threads=2)


def test_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY, seed=0)
    tensors = load_file(tmp_path / "model.safetensors")
    matrices = {name: t for name, t in tensors.items() if t.ndim == 2}
    embedding = matrices.pop("model.embed_tokens.weight")
    assert layer_weights(TINY) == sum(t.numel() for t in matrices.values())
    assert embedding.numel() == TINY.vocab_size * TINY.hidden_size


def test_a_decode_reads_every_weight_once_and_each_rows_cache() -> None:
    weights = layer_weights(TINY) + 32 * 18_600
    assert cache_bytes(TINY) == 2 * 2 * 2 * 2 * 8
    seconds = decode_step_seconds(TINY, SLOW_MEMORY, [10, 20])
    assert seconds == 2 * weights + 30 * cache_bytes(TINY)


def test_a_decode_multiplies_every_row_with_every_weight() -> None:
    weights = layer_weights(TINY) + 32 * 18_600
    seconds = decode_step_seconds(TINY, SLOW_CORES, [10, 20])
    assert seconds == 2 * 2 * weights + attention_flops(TINY, 30)


def test_a_prefill_is_causal_and_has_one_head_row_a_prompt() -> None:
    seconds = prefill_seconds(TINY, SLOW_CORES, [3, 2])
    positions = (1 + 2 + 3) + (1 + 2)
    assert seconds == 2 * (5 * layer_weights(TINY) + 2 * 32 * 18_600) + attention_flops(
        TINY, positions
    )


def test_a_batch_is_its_steps() -> None:
    machine = Machine(read_one=1e9, read_all=2e9, multiply=1e11, threads=2)
    expected = prefill_seconds(TINY, machine, [4, 4])
    expected += decode_step_seconds(TINY, machine, [5, 5])
    expected += prefill_seconds(TINY, machine, [6])
    expected += decode_step_seconds(TINY, machine, [6, 7])
    seconds = batch_seconds(TINY, machine, [(4, 3), (4, 2), (6, 2)], concurrency=2)
    assert seconds == pytest.approx(expected)


def test_limits_of_two_measurements_are_the_higher_ones() -> None:
    one = Machine(read_one=1.0, read_all=5.0, multiply=2.0, threads=2, other_cores=0.4)
    two = Machine(read_one=2.0, read_all=4.0, multiply=3.0, threads=2)
    best = one.best(two)
    assert (best.read_one, best.read_all, best.multiply, best.is_clean) == (2.0, 5.0, 3.0, True)


@pytest.mark.parametrize(("name", "step_ms", "prefill_ms"), [("135m", 8.6, 134), ("1b", 68, 1085)])
def test_the_known_shapes_on_a_known_machine(name: str, step_ms: float, prefill_ms: float) -> None:
    """30.5 GB/s and 1.9 TFLOP/s: figures that were worked out apart from this code."""
    machine = Machine(read_one=15.6e9, read_all=30.5e9, multiply=1.9e12, threads=2)
    shape = SHAPES[name]
    assert 1000 * decode_step_seconds(shape, machine, [192]) == pytest.approx(step_ms, rel=0.05)
    assert 1000 * prefill_seconds(shape, machine, [1024]) == pytest.approx(prefill_ms, rel=0.02)
