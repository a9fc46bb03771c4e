"""A forward pass with LoRA adapters, layers and head, on the CPU kernels, as a ratio to the same pass without.

Steps run in turn, and medians of the ratios are printed: of the CPU time of a thread with one thread, which a busy
machine hardly changes, and of wall time with more. Adapters have rank 16.
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

from bench.kernels import DTYPE, HEAD_DIM, SHAPES, Shape, new_cache, weight
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Layer, Layers
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.lora.adapter_table import (
    AdapterRows,
    AdapterTable,
    LoraPart,
    PackedAdapter,
    PackedPart,
    running,
)
from millrace_shard.kernels.stored_weight import StoredWeight

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


class Model:
    """Random layers, whose linears take adapters."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.kernels = shape, CpuKernels(deterministic=True)
        self.table = AdapterTable(CPU)
        norm, rope = torch.ones(shape.hidden, dtype=DTYPE), torch.randn(4096, HEAD_DIM)
        self.layers = self._layers(norm, rope)
        self.head = self.kernels.head(weight(shape.vocab, shape.hidden))
        self.caches = [new_cache(self.kernels, shape, 4 * ROWS) for _ in range(shape.layers)]
        self._load()

    def step(self, case: Case) -> Callable[[], None]:
        """A function that runs a decode step or a prompt."""
        rows = len(case.slots)
        sequences = [1] * rows if rows < PROMPT else [rows]
        context = [CONTEXT] * rows if rows < PROMPT else [rows]
        batch = ragged_batch(sequences, context, block_size=self.kernels.block_size)
        residual = torch.randn(rows, self.shape.hidden).to(DTYPE)
        tokens = AdapterRows.of(np.array(case.slots, dtype=np.int64), CPU)

        def forward() -> None:
            with running(self.table, tokens=tokens):
                y = self.layers(residual.clone(), batch, self.caches)
            self.head(y[batch.logit_rows])

        return forward

    def _layers(self, norm: Tensor, rope: Tensor) -> Layers:
        shape, sizes = self.shape, self.shape.linears()
        parts = {
            "qkv": (shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM, shape.kv_heads * HEAD_DIM),
            "out": (shape.hidden,),
            "gate_up": (shape.inter, shape.inter),
            "down": (shape.hidden,),
        }
        layers = []
        for _ in range(shape.layers):
            linears = {name: self._linear(parts[name], sizes[name][1]) for name in parts}
            attention = AttentionWeights(
                norm=NormWeights(weight=norm, eps=1e-5),
                qkv=linears["qkv"],
                out=linears["out"],
                rotation=Rotation(table=rope),
                scale=HEAD_DIM**-0.5,
                num_heads=shape.heads,
                num_kv_heads=shape.kv_heads,
                head_dim=HEAD_DIM,
            )
            mlp = MlpWeights(
                norm=NormWeights(weight=norm, eps=1e-5),
                gate_up=linears["gate_up"],
                down=linears["down"],
            )
            layers.append(Layer(self.kernels.attention(attention), self.kernels.mlp(mlp)))
        return self.kernels.layers(layers, None)

    def _linear(self, outputs: Sequence[int], inputs: int) -> LinearWeights:
        parts = [
            LoraPart(
                name="",
                inputs=inputs,
                outputs=count,
                input_range=(0, inputs),
                output_range=(0, count),
                first_output=sum(outputs[:i]),
            )
            for i, count in enumerate(outputs)
        ]
        stored = StoredWeight.of(weight(sum(outputs), inputs))
        return LinearWeights(stored, None, self.table.add_site(parts))

    def _load(self) -> None:
        """Put a copy of one adapter into each slot, with memory of its own."""
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
    """Groups of steps with equal rows; the first of each has no adapter."""
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


def measure(model: Model, group: Sequence[Case], rounds: int) -> None:
    """Print milliseconds and the ratio to the first case."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    steps = [model.step(case) for case in group]
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
        model = Model(SHAPES[name])
        for group in cases():
            measure(model, group, arguments.rounds)


if __name__ == "__main__":
    main()
