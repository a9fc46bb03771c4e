"""The roofline, against counts from the checkpoint itself and against sums worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bench.comparison.roofline import (
    Machine,
    attention_flops,
    batch_seconds,
    cache_bytes,
    decode_step_seconds,
    layer_weights,
    prefill_seconds,
)
from bench.harness.checkpoints import SHAPES, Shape, write_checkpoint
from safetensors.torch import load_file

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
