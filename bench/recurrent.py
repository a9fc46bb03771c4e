"""`python -m bench.recurrent`: prompts through layers with gated delta nets, against layers with attention.

Random weights in the shape of a small Qwen3-Next: the layers have equal second halves, and three of four are recurrent.
In each round one layer of each kind computes the prompt. Both rates are of the operations that a layer needs: products
of linears, the rule of the states by recurrence, and pairs of queries and keys.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bench.latent import DTYPE, linear, norm, seconds
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, Layer
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.delta_rule import DeltaHeads
from millrace_shard.kernels.layer_weights import AttentionWeights, MlpWeights, Rotation
from millrace_shard.kernels.recurrent_blocks import DeltaNet, DeltaNetWeights
from millrace_shard.kernels.states import StateLayer, StateRows

CPU = torch.device("cpu")
HIDDEN, INTER = 2048, 5632
KEYS, VALUES, WIDTH, KERNEL = 16, 32, 128, 4
HEADS, KV_HEADS = 16, 8
RULE = 7
"""Operations of the rule for each number of a state: decay, two products with keys, one with queries."""
RECURRENT = 3
"""Recurrent layers to one with attention."""


def delta_net(kernels: Kernels) -> DeltaNet:
    """The first half of a recurrent layer."""
    values = VALUES * WIDTH
    channels = 2 * KEYS * WIDTH + values
    heads = DeltaHeads(
        num_keys=KEYS,
        num_values=VALUES,
        key_dim=WIDTH,
        value_dim=WIDTH,
        conv=torch.randn(KERNEL, channels),
        rates=torch.ones(VALUES),
        dt_bias=torch.zeros(VALUES),
        norm=torch.ones(WIDTH, dtype=DTYPE),
        eps=1e-6,
    )
    projections = tuple(linear(count, HIDDEN) for count in (channels, values, VALUES, VALUES))
    out = linear(HIDDEN, values)
    weights = DeltaNetWeights(
        index=0, norm=norm(HIDDEN), projections=projections, out=out, heads=heads
    )
    return DeltaNet(kernels, weights)


def attention() -> AttentionWeights:
    """The first half of a layer as in Llama."""
    width = HEADS * WIDTH
    return AttentionWeights(
        norm=norm(HIDDEN),
        qkv=linear(width + 2 * KV_HEADS * WIDTH, HIDDEN),
        out=linear(HIDDEN, width),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        scale=WIDTH**-0.5,
        rotation=Rotation(table=torch.randn(1 << 15, WIDTH)),
    )


def operations(tokens: int) -> tuple[float, float]:
    """Operations of a prompt in a recurrent layer, and in one with attention."""
    mlp = 6 * HIDDEN * INTER
    values = VALUES * WIDTH
    linears = 2 * HIDDEN * (2 * KEYS * WIDTH + 3 * values + 2 * VALUES)
    of_heads = 2 * HIDDEN * WIDTH * 2 * (HEADS + KV_HEADS)
    pairs = 4 * HEADS * WIDTH * (tokens + 1) / 2
    return tokens * (mlp + linears + RULE * values * WIDTH), tokens * (mlp + of_heads + pairs)


def layers(kernels: Kernels, tokens: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """A prompt through a layer of each kind, ready to call."""
    batch = ragged_batch([tokens], [tokens], block_size=kernels.block_size)
    shape = StateLayer(KERNEL - 1, (2 * KEYS + VALUES) * WIDTH, (VALUES, WIDTH, WIDTH))
    states, none = (shape.new(2, DTYPE, CPU),), torch.zeros(0, dtype=torch.int64)
    states[0].zero(1)
    rows = StateRows(layers=states, pages=torch.ones(1, dtype=torch.int64), saved=none)
    batch = replace(batch, states=rows)
    cache = kernels.new_cache(
        num_blocks=int(batch.block_tables.max()) + 1,
        num_kv_heads=KV_HEADS,
        head_dim=WIDTH,
        dtype=DTYPE,
        device=CPU,
    )
    x = torch.randn(tokens, HIDDEN, dtype=DTYPE)

    def call(layer: Layer) -> Callable[[], Tensor]:
        run = kernels.layers([layer], None)
        return lambda: run(x.clone(), batch, [cache])

    def mlp() -> MlpWeights:
        first, last = linear(2 * INTER, HIDDEN), linear(HIDDEN, INTER)
        return MlpWeights(norm=norm(HIDDEN), gate_up=first, down=last)

    recurrent = Layer(delta_net(kernels), kernels.mlp(mlp()))
    return call(recurrent), call(Layer(kernels.attention(attention()), kernels.mlp(mlp())))


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(prog="python -m bench.recurrent", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_operators()
    calls = layers(CpuKernels(deterministic=True), arguments.tokens)
    times = [[seconds(call) for call in calls] for _ in range(1 + arguments.rounds)][1:]
    recurrent, dense = map(statistics.median, zip(*times, strict=True))
    of_recurrent, of_dense = operations(arguments.tokens)
    mixed = (RECURRENT * of_recurrent + of_dense) / (RECURRENT * recurrent + dense)
    print(
        "| tokens | threads | delta net, GFLOP/s | attention, GFLOP/s | three to one / attention |"
    )
    print("|--:|--:|--:|--:|--:|")
    print(
        f"| {arguments.tokens} | {arguments.threads} | {of_recurrent / recurrent / 1e9:.0f}"
        f" | {of_dense / dense / 1e9:.0f} | {mixed / (of_dense / dense):.2f} |"
    )


if __name__ == "__main__":
    main()
