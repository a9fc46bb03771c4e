"""`python -m bench.kv_cache`: decode steps of a 1B shape over long contexts, by the dtype of the KV cache.

Weights are random, of each kind of `bench.quantized.steps`. The steps of all dtypes run in turn. Medians are printed:
thread CPU time with one thread, which a busy machine hardly changes, and wall time with more.
"""

from __future__ import annotations

import argparse
import sys

import torch

from bench.harness.tables import markdown
from bench.kernels import DTYPE, HEAD_DIM, SHAPES, Shape, new_cache
from bench.quantized.steps import KINDS, Model
from bench.quantized.steps import medians as medians_of_calls
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.kv_cache import CACHE_DTYPES

FILLED_AT_ONCE = 8192


def main() -> int:
    """Print a table for each kind of weights."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_cache", description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    load_operators()
    torch.set_num_threads(arguments.threads)
    shape, kernels = SHAPES["1B"], CpuKernels(deterministic=True)
    contexts = [arguments.context] * arguments.streams
    caches = {
        name: filled_caches(kernels, shape, contexts, dtype)
        for name, dtype in {"bfloat16": DTYPE, **CACHE_DTYPES}.items()
    }
    for weights, kind in KINDS.items():
        rows = medians(Model(shape, kind), contexts, caches, arguments.rounds)
        heads = ["KV cache", "ms a step", "tokens/s", "against bfloat16"]
        print(f"weights in {weights}\n\n{markdown(heads, rows)}\n")
    return 0


def filled_caches(
    kernels: Kernels, shape: Shape, contexts: list[int], dtype: torch.dtype
) -> list[LayerCache]:
    """The caches of all layers, with random keys and values."""
    whole = ragged_batch(contexts, contexts, block_size=kernels.block_size)
    num_blocks = int(whole.block_tables.max()) + 1
    caches = []
    for _ in range(shape.layers):
        cache = new_cache(kernels, shape, num_blocks, dtype)
        size = FILLED_AT_ONCE, shape.kv_heads, HEAD_DIM
        keys, values = (torch.randn(size, dtype=DTYPE) for _ in range(2))
        for context in range(0, sum(contexts), FILLED_AT_ONCE):
            rows = whole.cache_rows[context : context + FILLED_AT_ONCE]
            torch.ops.millrace.store(keys[: len(rows)], values[: len(rows)], rows, cache.tensors)
        caches.append(cache)
    return caches


def medians(
    model: Model, contexts: list[int], caches: dict[str, list[LayerCache]], rounds: int
) -> list[list[str]]:
    """A row of the table for each of `caches`."""
    steps = {name: model.step(contexts, [1] * len(contexts), each) for name, each in caches.items()}
    median = medians_of_calls(steps, rounds)
    return [
        [
            name,
            f"{each * 1e3:.0f}",
            f"{len(contexts) / each:.1f}",
            f"{median['bfloat16'] / each:.2f}",
        ]
        for name, each in median.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
