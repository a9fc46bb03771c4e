"""`python -m bench.quantized.steps`: the speed of weights of 4 and 8 bits on CPU, against our own bfloat16.

Whole steps of a decoder with random weights, head included, one kind after the other in each round. Printed are
milliseconds of bfloat16 and the ratio of each kind to it, both of medians: thread CPU time with one thread, wall time
with more.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bench.gpu.engine.scale import LLAMA_8B
from bench.harness import checkpoints
from bench.harness.checkpoints import Shape
from millrace_shard.kernels.agreement import ragged_batch
from millrace_shard.kernels.base import Kernels, Layer, LayerCache
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.int8_linear import int8_weight
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.lora.adapter_table import AdapterTable, LoraPart, LoraSite
from millrace_shard.kernels.quantized import CodeFormat, QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight

SHAPES = {**{name.upper(): shape for name, shape in checkpoints.SHAPES.items()}, "8B": LLAMA_8B}
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
EPS = 1e-5
CACHE_TOKENS = 16384
LONGEST = 16384
STEPS = {
    "1 row": ([256], [1]),
    "8 rows": ([256] * 8, [1] * 8),
    "32 rows": ([256] * 32, [1] * 32),
    "prompt": ([1024], [1024]),
}
Quantize = Callable[[Tensor], Tensor | QuantizedTensor]


def as_it_is(dense: Tensor) -> Tensor:
    """The weight in bfloat16."""
    return dense


def int4(dense: Tensor) -> QuantizedTensor:
    """Random integers of 4 bits in groups of 128 inputs."""
    outputs, inputs = dense.shape
    return CodeFormat(values=tuple(range(-8, 8)), group_size=128).random(outputs, inputs, CPU)


def weight(rows: int, columns: int) -> Tensor:
    """A random weight of a realistic scale."""
    return torch.randn(rows, columns, dtype=DTYPE) * 0.02


@dataclass(frozen=True, slots=True)
class Kind:
    """How weights are stored and multiplied."""

    layers: Quantize
    head: Quantize
    integer: bool


BASE = "bf16"
KINDS = {
    BASE: Kind(as_it_is, as_it_is, integer=False),
    "int8": Kind(int8_weight, as_it_is, integer=True),
    "int8 exact": Kind(int8_weight, as_it_is, integer=False),
    "int4": Kind(int4, int8_weight, integer=False),
    "int4 int8": Kind(int4, int8_weight, integer=True),
}


class Model:
    """Random weights of one kind; `table` gets the sites of its layers, for adapters."""

    def __init__(self, shape: Shape, kind: Kind, table: AdapterTable | None = None) -> None:
        self.shape = shape
        self._table = table
        self.kernels: Kernels = CpuKernels(deterministic=True, integer=kind.integer)
        rotation = Rotation(table=torch.randn(LONGEST, shape.head_size))
        layers = [self._layer(kind, rotation) for _ in range(shape.num_layers)]
        self._layers = self.kernels.layers(layers, None)
        self._caches = [self._new_cache() for _ in range(shape.num_layers)]
        self._embedding = weight(shape.vocab_size, shape.hidden_size)
        self._norm = torch.ones(shape.hidden_size, dtype=DTYPE)
        self._head = self.kernels.head_from(_stored(kind.head(self._embedding)))

    def _layer(self, kind: Kind, rotation: Rotation) -> Layer:
        shape = self.shape
        hidden, inner, size = shape.hidden_size, shape.intermediate_size, shape.head_size
        norm = NormWeights(weight=torch.ones(hidden, dtype=DTYPE), eps=EPS)

        def linear(inputs: int, *outputs: int) -> LinearWeights:
            weights = _stored(kind.layers(weight(sum(outputs), inputs)))
            return replace(weights, lora=self._site(inputs, outputs))

        attention = AttentionWeights(
            norm=norm,
            qkv=linear(
                hidden, *(n * size for n in (shape.num_heads, *[shape.num_key_value_heads] * 2))
            ),
            out=linear(hidden, hidden),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=size,
            scale=size**-0.5,
            rotation=rotation,
        )
        mlp = MlpWeights(
            norm=norm, gate_up=linear(hidden, inner, inner), down=linear(inner, hidden)
        )
        return Layer(self.kernels.attention(attention), self.kernels.mlp(mlp))

    def _site(self, inputs: int, outputs: Sequence[int]) -> LoraSite | None:
        if self._table is None:
            return None
        starts = itertools.accumulate(outputs, initial=0)
        parts = [
            LoraPart(
                name=f"module {len(self._table.parts) + number}",
                inputs=inputs,
                outputs=count,
                input_range=(0, inputs),
                output_range=(0, count),
                first_output=start,
            )
            for number, (count, start) in enumerate(zip(outputs, starts, strict=False))
        ]
        return self._table.add_site(parts)

    def _new_cache(self) -> LayerCache:
        num_blocks = CACHE_TOKENS // self.kernels.block_size
        cache = self.kernels.new_cache(
            num_blocks=num_blocks,
            num_kv_heads=self.shape.num_key_value_heads,
            head_dim=self.shape.head_size,
            dtype=DTYPE,
            device=CPU,
        )
        self.kernels.zero_blocks(cache, torch.arange(num_blocks))
        return cache

    def step(self, contexts: list[int], queries: list[int]) -> Callable[[], Tensor]:
        """One forward pass, ready to call."""
        batch = ragged_batch(queries, contexts, block_size=self.kernels.block_size)

        def forward() -> Tensor:
            residual = F.embedding(batch.ids, self._embedding)
            x = self._layers(residual, batch, self._caches)
            normed = self.kernels.add_rms_norm(x, residual, self._norm, EPS)
            return self._head(normed[batch.logit_rows])

        return forward


def _stored(part: Tensor | QuantizedTensor) -> LinearWeights:
    return LinearWeights(StoredWeight((part,), DTYPE, CPU))


def medians(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Median seconds of each call; all are called in each round."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            begin = clock()
            call()
            if round_ > 0:
                samples[name].append(clock() - begin)
    return {name: statistics.median(each) for name, each in samples.items()}


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantized.steps", description=__doc__)
    parser.add_argument("threads", type=int, nargs="?", default=1)
    parser.add_argument("shapes", nargs="?", default="135M,1B", help="separated by commas")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load_operators()
    kinds = {name: kind for name, kind in KINDS.items() if name in {BASE, *arguments.kinds}}
    print(f"| shape | step | bf16, ms | {' | '.join(list(kinds)[1:])} |")
    print(f"|---|---|{'--:|' * len(kinds)}")
    for name in arguments.shapes.split(","):
        shape = SHAPES[name]
        if arguments.layers is not None:
            shape = replace(shape, num_layers=arguments.layers)
        models = {kind: Model(shape, each) for kind, each in kinds.items()}
        for label, (contexts, queries) in STEPS.items():
            calls = {kind: model.step(contexts, queries) for kind, model in models.items()}
            rounds = max(3, arguments.rounds // 3) if label == "prompt" else arguments.rounds
            seconds = medians(calls, rounds)
            base = seconds.pop(BASE)
            ratios = " | ".join(f"{each / base:.2f}" for each in seconds.values())
            print(f"| {name} | {label} | {1e3 * base:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
