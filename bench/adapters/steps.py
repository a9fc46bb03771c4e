"""`python -m bench.adapters.steps`: steps in which each row has another adapter, against steps without adapters.

Whole steps of a decoder with random weights, head included, in turn. Adapters have rank 16 on all projections. Printed
are medians in milliseconds and the speed as a share of the base: thread CPU time with one thread, wall time with more.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from bench.quantized.steps import BASE, CPU, DTYPE, KINDS, SHAPES, Model, medians
from millrace_shard.adapters.arena import together
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.lora.adapter_table import (
    AdapterRows,
    AdapterTable,
    LoraPart,
    PackedAdapter,
    pack_part,
    running,
)

RANK = 16
CONTEXT = 192


def random_adapter(number: int, parts: list[LoraPart]) -> PackedAdapter:
    """An adapter that changes every module."""
    packed = {}
    for index, part in enumerate(parts):
        a = torch.randn(RANK, part.inputs) / math.sqrt(part.inputs)
        b = torch.randn(part.outputs, RANK) / math.sqrt(RANK)
        packed[index] = pack_part(a.to(DTYPE), b.to(DTYPE), torch.ones(RANK), None, "tiles", CPU)
    return together(PackedAdapter(digest=str(number), parts=packed, num_pages=0))


def with_adapters(
    table: AdapterTable, step: Callable[[], Tensor], rows: int
) -> Callable[[], Tensor]:
    """The step with another adapter for each row."""
    adapters = AdapterRows.of(np.arange(rows) % table.max_adapters + 1, CPU)

    def call() -> Tensor:
        with running(table, tokens=adapters):
            return step()

    return call


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters.steps", description=__doc__)
    parser.add_argument("threads", type=int, nargs="?", default=1)
    parser.add_argument("shape", nargs="?", default="135M", choices=tuple(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_operators()
    shape = SHAPES[arguments.shape]
    if arguments.layers is not None:
        shape = replace(shape, num_layers=arguments.layers)
    table = AdapterTable(CPU)
    model = Model(shape, KINDS[BASE], table)
    table.resize(arguments.adapters)
    for slot in range(1, arguments.adapters + 1):
        table.put(slot, random_adapter(slot, table.parts))
    print("| rows | base, ms | with adapters, ms | share |\n|--:|--:|--:|--:|")
    for rows in arguments.rows:
        step = model.step([CONTEXT] * rows, [1] * rows)
        seconds = medians(
            {"base": step, "adapters": with_adapters(table, step, rows)}, arguments.rounds
        )
        base, ours = seconds["base"], seconds["adapters"]
        print(f"| {rows} | {1e3 * base:.1f} | {1e3 * ours:.1f} | {base / ours:.2f} |", flush=True)


if __name__ == "__main__":
    main()
