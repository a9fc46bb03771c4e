"""Halves of a layer and whole layers over codes, against plain torch, and against themselves in other batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import (
    HIDDEN,
    Random,
    attention_weights,
    distance,
    filled_cache,
    mlp_weights,
    ragged_batch,
)
from millrace_shard.kernels.base import Kernels, Layer
from millrace_shard.kernels.cpu.int8_linear import int8_weight, with_int8
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.tile_blocks import TiledLayers
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight

BF16, CPU, DIM = torch.bfloat16, torch.device("cpu"), 64
QUERIES, CONTEXTS = (70, 3, 9), (70, 270, 300)
NUM_LAYERS = 3


pytestmark = pytest.mark.usefixtures("tiles", "two_threads")


def int4(weight: Tensor, group: int) -> QuantizedTensor:
    """Integers from -8 to 7 in groups of `group` inputs, with an offset for each group."""
    groups = list(torch.split(weight.float(), group, dim=1))
    low, high = (torch.stack([f(each, 1) for each in groups], 1) for f in (torch.amin, torch.amax))
    scales = (high - low) / 15
    wide = torch.arange(weight.shape[1]) // group
    codes = ((weight.float() - low[:, wide]) / scales[:, wide]).round().to(torch.uint8)
    return QuantizedTensor(
        codes=codes,
        values=torch.arange(16.0) - 8,
        scales=scales,
        offsets=low + 8 * scales,
        group_size=group,
    )


def coded(weights: LinearWeights, layer: int) -> LinearWeights:
    """The same linear over codes, of another kind in each layer."""
    weight = weights.weight.copied()
    kinds = (partial(int4, group=32), partial(int4, group=16), int8_weight)
    return replace(weights, weight=StoredWeight((kinds[layer % 3](weight),), BF16, CPU))


def layers_of(kernels: Kernels, *, quantize: bool = True) -> list[Layer]:
    random, layers = Random(BF16, CPU), []
    rotation = attention_weights(random, DIM, optional=True).rotation
    for layer in range(NUM_LAYERS):
        attention = attention_weights(random, DIM, optional=True)
        attention, mlp = replace(attention, rotation=rotation), mlp_weights(random, optional=True)
        if quantize:
            attention = replace(
                attention, qkv=coded(attention.qkv, layer), out=coded(attention.out, layer)
            )
            mlp = replace(mlp, gate_up=coded(mlp.gate_up, layer), down=coded(mlp.down, layer))
        layers.append(Layer(kernels.attention(attention), kernels.mlp(mlp)))
    return layers


def run(kernels: Kernels, layers: Sequence[Layer], *steps: Sequence[int]) -> list[Tensor]:
    """The results of the last QUERIES tokens of CONTEXTS, by sequence; a step has some tokens of each."""
    small = LayerShape.small(DIM)
    caches = [filled_cache(kernels, Random(BF16, CPU), small, CONTEXTS) for _ in range(NUM_LAYERS)]
    together = kernels.layers(layers, None)
    inputs = torch.split(Random(BF16, CPU)(sum(QUERIES), HIDDEN), list(QUERIES))
    results: list[list[Tensor]] = [[] for _ in QUERIES]
    done = [0] * len(QUERIES)
    for step in steps:
        ends = [start + count for start, count in zip(done, step, strict=True)]
        contexts = [c - q + end for c, q, end in zip(CONTEXTS, QUERIES, ends, strict=True)]
        batch = ragged_batch(step, contexts, block_size=kernels.block_size, tables_of=CONTEXTS)
        residual = torch.cat([rows[done[i] : ends[i]] for i, rows in enumerate(inputs)])
        y = together(residual, batch, caches) + residual
        for i, rows in enumerate(torch.split(y, list(step))):
            results[i].append(rows)
        done = ends
    return [torch.cat(rows) for rows in results]


def test_layers_of_codes_match_plain_torch() -> None:
    kernels, plain = CpuKernels(deterministic=True), PlainKernels(deterministic=True)
    layers = layers_of(kernels)
    assert isinstance(kernels.layers(layers, None), TiledLayers)
    ours, theirs = run(kernels, layers, QUERIES), run(plain, layers_of(plain), QUERIES)
    assert distance(ours, theirs) < 0.06


def test_layers_of_integers_are_close_to_plain_torch() -> None:
    exact, kernels = (CpuKernels(deterministic=True, integer=each) for each in (False, True))
    plain = PlainKernels(deterministic=True)
    ours, theirs = run(kernels, layers_of(kernels), QUERIES), run(plain, layers_of(plain), QUERIES)
    assert distance(ours, run(exact, layers_of(exact), QUERIES)) > 0
    assert distance(ours, theirs) < 0.2


def test_int8_layers_are_one_operator_and_match_plain_linears() -> None:
    tiled = with_int8(CpuKernels(deterministic=True))
    plain = with_int8(PlainKernels(deterministic=True))
    layers = layers_of(tiled, quantize=False)
    assert isinstance(tiled.layers(layers, None), TiledLayers)
    ours = run(tiled, layers, QUERIES)
    assert distance(ours, run(plain, layers_of(plain, quantize=False), QUERIES)) < 0.15


@pytest.mark.parametrize("integer", [False, True])
def test_a_token_has_the_same_bits_in_any_batch(integer: bool) -> None:
    kernels = CpuKernels(deterministic=True, integer=integer)
    layers = layers_of(kernels)
    whole = run(kernels, layers, QUERIES)
    for steps in (((69, 1, 1), (1, 2, 8)), ((33, 1, 1), (1, 1, 1), (36, 1, 7))):
        for one, other in zip(run(kernels, layers, *steps), whole, strict=True):
            assert torch.equal(one, other)
