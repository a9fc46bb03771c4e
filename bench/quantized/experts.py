"""`python -m bench.quantized.experts`: how long does one row take in mixtures of experts over 4 bits?

Layers with random codes have the shapes of published models. Printed are milliseconds a layer, of the experts' operator
alone, and their ratio to the floor: the bytes of the chosen experts, as they are packed, at the rate at which this
machine reads memory. In bfloat16 there are fewer experts, so that they fit; a row reads as many.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.comparison.roofline import best_probe
from bench.harness.quiet import Quiet
from millrace_launcher.host.threads import usable_cores
from millrace_shard.kernels.build import load_operators
from millrace_shard.kernels.cpu.tile_experts import TiledExperts
from millrace_shard.kernels.expert_weights import (
    ExpertsWeights,
    ExpertWeights,
    RouterWeights,
    RoutingRule,
    Scoring,
)
from millrace_shard.kernels.layer_weights import Activation, ClampedSwiglu, LinearWeights
from millrace_shard.kernels.quantized import CodeFormat
from millrace_shard.kernels.stored_weight import StoredWeight

DTYPE = torch.bfloat16
CPU = torch.device("cpu")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4 = CodeFormat(values=(*E2M1, *(-value for value in E2M1)), group_size=32)
INT4 = CodeFormat(values=tuple(map(float, range(-8, 8))), group_size=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of a model."""

    hidden: int
    inter: int
    experts: int
    rule: RoutingRule
    activation: Activation | ClampedSwiglu
    form: CodeFormat
    bias: bool

    def weights(self, form: CodeFormat | None, count: int, seed: int) -> ExpertsWeights:
        """`count` experts with the same codes, in memory of their own once they are packed."""
        generator = torch.Generator().manual_seed(seed)
        expert = ExpertWeights(
            gate_up=self._linear(2 * self.inter, self.hidden, form, generator),
            down=self._linear(self.hidden, self.inter, form, generator),
        )
        router = torch.randn(count, self.hidden, generator=generator) / self.hidden**0.5

        def each() -> Iterator[ExpertWeights]:
            for _ in range(count):
                yield expert

        return ExpertsWeights(
            router=RouterWeights(weight=router, bias=None, correction=None, rule=self.rule),
            experts=each(),
            activation=self.activation,
            inter=self.inter,
            dtype=DTYPE,
        )

    def _linear(
        self, outputs: int, inputs: int, form: CodeFormat | None, generator: torch.Generator
    ) -> LinearWeights:
        bias = torch.zeros(outputs, dtype=DTYPE) if self.bias else None
        if form is None:
            dense = torch.randn(outputs, inputs, generator=generator).to(DTYPE)
            return LinearWeights(StoredWeight.of(dense), bias)
        codes = form.random(outputs, inputs, CPU, generator.initial_seed())
        if form is MXFP4:
            codes.scales.log2_().round_().exp2_()
        return LinearWeights(StoredWeight((codes,), DTYPE, CPU), bias)

    def bytes_of(self, form: CodeFormat | None) -> float:
        """Bytes of the chosen experts' codes and scales; a scale takes two."""
        each = 2 if form is None else 0.5 + 2 / (form.group_size or self.hidden)
        return self.rule.top_k * 3 * self.hidden * self.inter * each


MIXTURES = {
    "gpt-oss-20b": Mixture(
        hidden=2880,
        inter=2880,
        experts=32,
        rule=RoutingRule(top_k=4, scoring=Scoring.SOFTMAX_OF_CHOSEN),
        activation=ClampedSwiglu(alpha=1.702, limit=7.0),
        form=MXFP4,
        bias=True,
    ),
    "Qwen3-30B-A3B": Mixture(
        hidden=2048,
        inter=768,
        experts=128,
        rule=RoutingRule(top_k=8, scoring=Scoring.SOFTMAX, renormalise=True),
        activation=Activation.SILU,
        form=INT4,
        bias=False,
    ),
}


def seconds_of(layers: list[TiledExperts], hidden: int, rounds: int) -> float:
    """The median time of one row in one layer; the layers follow each other as in a model."""
    samples = []
    for _ in range(rounds + 2):
        x = torch.randn(1, hidden).to(DTYPE)
        begin = time.perf_counter()
        for layer in layers:
            layer(x)
        samples.append((time.perf_counter() - begin) / len(layers))
    return statistics.median(samples[2:])


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantized.experts", description=__doc__)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for quiet")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_num_threads(arguments.threads)
    load_operators()
    quiet = Quiet(patience_seconds=arguments.patience)
    print("| model | experts in | ms a layer | floor, ms | ratio | read, GB/s | memory, GB/s |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for name, mixture in MIXTURES.items():
        kinds = ((mixture.form, False), (mixture.form, True), (None, False))
        for form, integer in kinds:
            count = mixture.experts if form else 2 * mixture.rule.top_k
            layers = [
                TiledExperts(mixture.weights(form, count, seed), integer=integer)
                for seed in range(arguments.layers)
            ]
            rate, _ = best_probe("read", arguments.threads, quiet, seconds=1.0)
            seconds = seconds_of(layers, mixture.hidden, arguments.rounds)
            again, _ = best_probe("read", arguments.threads, quiet, seconds=1.0)
            read, rate = mixture.bytes_of(form), max(rate, again)
            kind = f"4 bits, {'int8' if integer else 'exact'}" if form else "bfloat16"
            print(
                f"| {name} | {kind} | {1e3 * seconds:.3f} | {1e3 * read / rate:.3f}"
                f" | {seconds * rate / read:.2f} | {read / seconds / 1e9:.1f} | {rate / 1e9:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
