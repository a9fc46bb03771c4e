"""A forward pass with LoRA adapters, layers and head, on the CPU kernels, as a ratio to the same pass without.

Steps run in turn, and medians of the ratios are printed: of the CPU time of a thread with one thread, which a busy
machine hardly changes, and of wall time with more. Adapters have rank 16. Steps are those of
`bench.quantized.steps`, with bfloat16 weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.kernels import HEAD_DIM, SHAPES, Shape, weight
from bench.quantized.steps import BASE, KINDS, Kind, Model
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.layer_weights import (
    LinearWeights,
)
from millrace_shard.kernels.lora.adapter_table import (
    AdapterRows,
    AdapterTable,
    LoraPart,
    PackedAdapter,
    PackedPart,
    running,
)

CPU = torch.device("cpu")
RANK = 16
ROWS = 32
PROMPT = 1024
CONTEXT = 192
"""Positions of a sequence in a step of decodes."""
MODULES = 7
QUERY_VALUE = (0, 2)
"""The modules of a layer that PEFT targets by default."""


@dataclass(frozen=True, slots=True)
class Case:
    """The adapter slots of a step's rows."""

    name: str
    slots: Sequence[int]
    """Slots 1 to 32 have adapters for all modules, and slots 33 to 64 for queries and values; 0 has none."""


class AdaptedModel(Model):
    """Random layers, whose linears take adapters."""

    def __init__(self, shape: Shape) -> None:
        self.table = AdapterTable(CPU)
        super().__init__(shape, KINDS[BASE])
        self._load()

    def linear(self, kind: Kind, name: str, size: tuple[int, int]) -> LinearWeights:
        """As of a model without adapters, with a site for each projection."""
        outputs, inputs = size
        heads, kv_heads = self.shape.heads * HEAD_DIM, self.shape.kv_heads * HEAD_DIM
        counts = {"qkv": (heads, kv_heads, kv_heads), "gate_up": (outputs // 2, outputs // 2)}
        parts, first = [], 0
        for count in counts.get(name, (outputs,)):
            parts.append(
                LoraPart(
                    name="",
                    inputs=inputs,
                    outputs=count,
                    input_range=(0, inputs),
                    output_range=(0, count),
                    first_output=first,
                )
            )
            first += count
        plain = super().linear(kind, name, size)
        return LinearWeights(plain.weight, None, self.table.add_site(parts))

    def adapted_step(self, case: Case) -> Callable[[], Tensor]:
        """A function that runs a decode step or a prompt."""
        rows = len(case.slots)
        queries = [1] * rows if rows < PROMPT else [rows]
        contexts = [CONTEXT] * rows if rows < PROMPT else [rows]
        forward = self.step(contexts, queries)
        tokens = AdapterRows.of(np.array(case.slots, dtype=np.int64), CPU)

        def adapted() -> Tensor:
            with running(self.table, tokens=tokens):
                return forward()

        return adapted

    def _load(self) -> None:
        """Put a copy of one adapter into each slot, with its own memory."""
        self.table.resize(2 * ROWS)
        pack_a, pack_b = torch.ops.millrace.pack_lora_a, torch.ops.millrace.pack_lora_b
        packed = [
            (pack_a(weight(RANK, part.num_inputs)), pack_b(weight(part.num_outputs, RANK)))
            for part in self.table.parts[:MODULES]
        ]
        for slot in range(1, 2 * ROWS + 1):
            parts = {}
            for index in range(len(self.table.parts)):
                if slot > ROWS and index % MODULES not in QUERY_VALUE:
                    continue
                a, b = packed[index % MODULES]
                parts[index] = PackedPart(
                    a=a.clone(), b=b.clone(), factors=torch.ones(RANK), bias=None, num_slices=1
                )
            self.table.put(slot, PackedAdapter(digest="", parts=parts, num_pages=1))


def cases() -> list[list[Case]]:
    """Groups of steps with equal rows; the first of each is without an adapter."""
    return [
        [Case("1 row", [0]), Case("one adapter", [1])],
        [
            Case(f"{ROWS} rows", [0] * ROWS),
            Case("one adapter", [1] * ROWS),
            Case(f"{ROWS} adapters, q and v", range(ROWS + 1, 2 * ROWS + 1)),
            Case(f"{ROWS} adapters", range(1, ROWS + 1)),
        ],
        [Case(f"prompt of {PROMPT}", [0] * PROMPT), Case("one adapter", [1] * PROMPT)],
    ]


def measure(model: AdaptedModel, group: Sequence[Case], rounds: int) -> None:
    """Print milliseconds and the ratio to the first case."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    steps = [model.adapted_step(case) for case in group]
    samples: list[list[float]] = [[] for _ in group]
    for round_ in range(rounds + 1):
        for step, times in zip(steps, samples, strict=True):
            begin = clock()
            step()
            if round_ > 0:
                times.append(clock() - begin)
    for case, times in zip(group, samples, strict=True):
        ratio = statistics.median(b / t for b, t in zip(samples[0], times, strict=True))
        print(f"  {case.name:22} {statistics.median(times) * 1e3:8.2f} ms  {ratio:.3f}", flush=True)


def main() -> None:
    """Measure all cases and print them."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters.kernels", description=__doc__)
    parser.add_argument("threads", type=int, nargs="?", default=1)
    parser.add_argument("shapes", nargs="?", default="135M,1B", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    load_operators()
    for name in arguments.shapes.split(","):
        print(f"{name}, {torch.get_num_threads()} threads", flush=True)
        model = AdaptedModel(SHAPES[name])
        for group in cases():
            measure(model, group, arguments.rounds)


if __name__ == "__main__":
    main()
