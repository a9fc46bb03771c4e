"""Microseconds of each operation of a decoder step, plain torch against the CPU kernels.

The CPU kernels run in both modes; deterministic ones differ in linears alone.

All run in turn. Medians are printed: thread CPU time with one thread, which a busy machine hardly changes, and wall
time with more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.plain import PlainKernels

DTYPE = torch.bfloat16
HEAD_DIM = 64
ROUNDS = 7
ROTATED_BYTES = 64e6
NUM_BLOCKS = 32 * 8 + 40
STEPS = (
    ([512], [1]),
    ([512] * 8, [1] * 8),
    ([512] * 32, [1] * 32),
    ([512], [512]),
    ([512] * 31 + [128], [1] * 31 + [128]),
)


Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama without its weights."""

    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, int]]:
        """[out, in] of a layer's weights."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * HEAD_DIM, self.hidden),
            "out": (self.hidden, self.heads * HEAD_DIM),
            "gate_up": (2 * self.inter, self.hidden),
            "down": (self.hidden, self.inter),
        }


SHAPES = {
    "135M": Shape(hidden=576, inter=1536, layers=30, heads=9, kv_heads=3, vocab=49152),
    "1B": Shape(hidden=2048, inter=8192, layers=16, heads=32, kv_heads=8, vocab=32768),
    # Llama 3.1 8B has half as many heads, twice as wide; its linears are of these sizes.
    "8B": Shape(hidden=4096, inter=14336, layers=32, heads=64, kv_heads=16, vocab=128256),
}


def weight(rows: int, columns: int) -> Tensor:
    """A random weight of a realistic scale."""
    return torch.randn(rows, columns, dtype=DTYPE) * 0.02


def new_cache(kernels: Kernels, shape: Shape, num_blocks: int) -> LayerCache:
    """A zeroed layer cache of `num_blocks` blocks of 64 positions, for any block size of the kernels."""
    num_blocks = num_blocks * 64 // kernels.block_size
    cache = kernels.new_cache(
        num_blocks=num_blocks,
        num_kv_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        dtype=DTYPE,
        device=torch.device("cpu"),
    )
    kernels.zero_blocks(cache, torch.arange(num_blocks))
    return cache


def medians(calls: dict[str, list[Call]]) -> str:
    """Median microseconds of a call of each kind, run in turn; a kind's calls work on different copies."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(ROUNDS + 1):
        for name, copies in calls.items():
            begin = clock()
            for call in copies:
                call()
            if round_ > 0:
                samples[name].append((clock() - begin) / len(copies) * 1e6)
    return "  ".join(f"{name} {statistics.median(each):9.0f}" for name, each in samples.items())


def bench_linears(shape: Shape, kinds: dict[str, Kernels]) -> None:
    """Every weight of a layer at several row counts, rotated out of the caches."""
    for name, (out, inputs) in shape.linears().items():
        copies = max(1, min(40, int(ROTATED_BYTES / (2 * out * inputs))))
        weights = [weight(out, inputs) for _ in range(copies)]
        linears = {kind: [each.linear(w) for w in weights] for kind, each in kinds.items()}
        for rows in (1, 8, 32, 128, 512):
            x = torch.randn(rows, inputs, dtype=DTYPE)
            calls: dict[str, list[Call]] = {
                kind: [partial(linear, x) for linear in each] for kind, each in linears.items()
            }
            print(f"  {name:8} rows {rows:4}  {medians(calls)}")


def bench_rows(shape: Shape, kinds: dict[str, Kernels]) -> None:
    """The other operations on rows, for one token and for 512."""
    norm = torch.ones(shape.hidden, dtype=DTYPE)
    for rows in (1, 512):
        x, residual = (torch.randn(rows, shape.hidden, dtype=DTYPE) for _ in range(2))
        gate_up = torch.randn(rows, 2 * shape.inter, dtype=DTYPE)
        add_norm: dict[str, list[Call]] = {}
        silu_mul: dict[str, list[Call]] = {}
        for kind, kernels in kinds.items():
            add_norm[kind] = [partial(kernels.add_rms_norm, x, residual, norm, 1e-5)] * 20
            silu_mul[kind] = [partial(kernels.silu_mul, gate_up)] * 20
        print(f"  add_norm rows {rows:4}  {medians(add_norm)}")
        print(f"  silu_mul rows {rows:4}  {medians(silu_mul)}")


def bench_attention(shape: Shape, kinds: dict[str, Kernels]) -> None:
    """Rope with store, and attention, of one layer; caches rotate."""
    heads = shape.heads + 2 * shape.kv_heads
    rope = torch.randn(4096, HEAD_DIM)
    for num_context, num_queries in STEPS:
        qkv = torch.randn(sum(num_queries), heads * HEAD_DIM, dtype=DTYPE)
        queries = qkv.view(len(qkv), heads, HEAD_DIM)[:, : shape.heads]
        stores: dict[str, list[Call]] = {}
        attends: dict[str, list[Call]] = {}
        for kind, kernels in kinds.items():
            batch = ragged_batch(num_queries, num_context, block_size=kernels.block_size)
            caches = [new_cache(kernels, shape, NUM_BLOCKS) for _ in range(4)]
            stores[kind] = [
                partial(
                    kernels.rope_store,
                    qkv,
                    rope,
                    batch,
                    cache,
                    num_heads=shape.heads,
                    num_kv_heads=shape.kv_heads,
                )
                for cache in caches
            ]
            attends[kind] = [
                partial(kernels.attend, queries, batch, cache, scale=HEAD_DIM**-0.5)
                for cache in caches
            ]
        label = f"{len(num_queries)} sequences, {sum(num_queries)} tokens"
        print(f"  rope     {label:25}  {medians(stores)}")
        print(f"  attend   {label:25}  {medians(attends)}")


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("threads", type=int, nargs="?", default=1)
    parser.add_argument("shapes", nargs="?", default="135M,1B", help="separated by commas")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    load_operators()
    kinds: dict[str, Kernels] = {
        "plain": PlainKernels(deterministic=False),
        "cpu": CpuKernels(deterministic=True),
        "cpu fast": CpuKernels(deterministic=False),
    }
    for name in arguments.shapes.split(","):
        print(f"{name}, {torch.get_num_threads()} threads, median µs")
        bench_linears(SHAPES[name], kinds)
        bench_rows(SHAPES[name], kinds)
        bench_attention(SHAPES[name], kinds)


if __name__ == "__main__":
    main()
