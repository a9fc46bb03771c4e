"""`python -m bench.recurrent`: prompts and decodes through layers with gated delta nets.

Random weights in the shape of a small Qwen3-Next: the layers have equal second halves, and three of four are recurrent.
For prompts, one layer of each kind computes the prompt in each round. Both rates are of the operations that a layer
needs: products of linears, the rule of the states by recurrence, and pairs of queries and keys.

`--decode` times steps of 1 and of 32 rows through twelve layers and a head, 1B in all, in turn with a sum over a
gibibyte and a square product. The floors are the times to read weights, states, keys and values as fast as the sums
read, and to multiply rows with weights as fast as the products. It takes 4 GB of memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from bench.comparison.roofline_probe import READ_VALUES, SIDE, multiplied_type
from bench.latent import DTYPE, EPS, linear, norm, seconds, weight
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
LAYERS, VOCAB = 12, 102_400
"""Layers and tokens of the model whose decodes are timed, which has a billion parameters."""
STATE = StateLayer(KERNEL - 1, (2 * KEYS + VALUES) * WIDTH, (VALUES, WIDTH, WIDTH))


def mlp() -> MlpWeights:
    """The second half of a layer."""
    gate_up, down = linear(2 * INTER, HIDDEN), linear(HIDDEN, INTER)
    return MlpWeights(norm=norm(HIDDEN), gate_up=gate_up, down=down)


def delta_net(kernels: Kernels, index: int = 0) -> DeltaNet:
    """The first half of the recurrent layer `index`."""
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
        index=index, norm=norm(HIDDEN), projections=projections, out=out, heads=heads
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
    states, none = (STATE.new(2, DTYPE, CPU),), torch.zeros(0, dtype=torch.int64)
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

    recurrent = Layer(delta_net(kernels), kernels.mlp(mlp()))
    return call(recurrent), call(Layer(kernels.attention(attention()), kernels.mlp(mlp())))


def decode(kernels: Kernels, rows: int, context: int) -> Callable[[], Tensor]:
    """A step of `rows` decodes after `context` - 1 tokens each, ready to call."""
    first_halves = [
        kernels.attention(attention())
        if is_dense(index)
        else delta_net(kernels, recurrent_before(index))
        for index in range(LAYERS)
    ]
    layers = kernels.layers([Layer(half, kernels.mlp(mlp())) for half in first_halves], None)
    batch = ragged_batch([1] * rows, [context] * rows, block_size=kernels.block_size)
    states = tuple(STATE.new(rows + 1, DTYPE, CPU) for _ in range(recurrent_before(LAYERS)))
    for state in states:
        for tensor in state.tensors:
            tensor.zero_()
    pages, none = torch.arange(1, rows + 1), torch.zeros(0, dtype=torch.int64)
    batch = replace(batch, states=StateRows(layers=states, pages=pages, saved=none))
    caches = [
        kernels.new_cache(
            num_blocks=int(batch.block_tables.max()) + 1 if is_dense(index) else 1,
            num_kv_heads=KV_HEADS,
            head_dim=WIDTH,
            dtype=DTYPE,
            device=CPU,
        )
        for index in range(LAYERS)
    ]
    head, last = kernels.head(weight(VOCAB, HIDDEN)), torch.ones(HIDDEN, dtype=DTYPE)
    embedded = torch.randn(rows, HIDDEN, dtype=DTYPE)

    def forward() -> Tensor:
        residual = embedded.clone()
        x = layers(residual, batch, caches)
        return head(kernels.add_rms_norm(x, residual, last, EPS))

    return forward


def is_dense(index: int) -> bool:
    """Whether the layer has attention."""
    return index % (RECURRENT + 1) == RECURRENT


def recurrent_before(index: int) -> int:
    """Recurrent layers before the layer `index`."""
    return sum(not is_dense(before) for before in range(index))


def bytes_of(rows: int, context: int) -> tuple[int, int]:
    """The bytes that a step of decodes reads: of weights; of states, keys and values."""
    values, recurrent = VALUES * WIDTH, recurrent_before(LAYERS)
    delta_nets = recurrent * HIDDEN * (2 * KEYS * WIDTH + 3 * values + 2 * VALUES)
    attentions = (LAYERS - recurrent) * HIDDEN * WIDTH * 2 * (HEADS + KV_HEADS)
    weights = delta_nets + attentions + LAYERS * 3 * HIDDEN * INTER + VOCAB * HIDDEN
    kept = (LAYERS - recurrent) * context * 2 * KV_HEADS * WIDTH * DTYPE.itemsize
    return weights * DTYPE.itemsize, rows * (kept + recurrent * STATE.num_bytes(DTYPE))


def print_decodes(kernels: Kernels, context: int, rounds: int) -> None:
    """Print a line for each number of rows."""
    print(
        "| rows | context | MB read | GB/s | TFLOP/s | floor of bytes, ms | of products, ms | step, ms |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|")
    probe, square = torch.ones(READ_VALUES), torch.randn(SIDE, SIDE).to(multiplied_type())
    for rows in (1, 32):
        calls = decode(kernels, rows, context), probe.sum, lambda: square @ square
        times = [[seconds(call) for call in calls] for _ in range(1 + rounds)][1:]
        step, read, product = map(statistics.median, zip(*times, strict=True))
        weights, kept = bytes_of(rows, context)
        rate, speed = 4.0 * READ_VALUES / read, 2.0 * SIDE**3 / product
        floors = (weights + kept) / rate, rows * weights / speed
        shown = (f"{1e3 * time:.1f}" for time in (*floors, step))
        print(
            f"| {rows} | {context} | {(weights + kept) / 1e6:.0f} | {rate / 1e9:.1f}"
            f" | {speed / 1e12:.2f} | {' | '.join(shown)} |"
        )


def print_prompts(kernels: Kernels, tokens: int, rounds: int) -> None:
    """Print the rates of both kinds of layers."""
    calls = layers(kernels, tokens)
    times = [[seconds(call) for call in calls] for _ in range(1 + rounds)][1:]
    recurrent, dense = map(statistics.median, zip(*times, strict=True))
    of_recurrent, of_dense = operations(tokens)
    mixed = (RECURRENT * of_recurrent + of_dense) / (RECURRENT * recurrent + dense)
    print(
        "| tokens | threads | delta net, GFLOP/s | attention, GFLOP/s | three to one / attention |"
    )
    print("|--:|--:|--:|--:|--:|")
    print(
        f"| {tokens} | {torch.get_num_threads()} | {of_recurrent / recurrent / 1e9:.0f}"
        f" | {of_dense / dense / 1e9:.0f} | {mixed / (of_dense / dense):.2f} |"
    )


def main() -> None:
    """Print medians."""
    parser = argparse.ArgumentParser(prog="python -m bench.recurrent", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="of a prompt, or before a decode")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--decode", action="store_true")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_operators()
    measure = print_decodes if arguments.decode else print_prompts
    measure(CpuKernels(deterministic=True), arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
