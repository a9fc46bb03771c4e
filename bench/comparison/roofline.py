"""The shortest possible time of a case on this machine: bytes over bandwidth, or operations over peak.

A step reads every weight once, and the keys and values of its rows. It multiplies each row with every weight, and
with the output head only where a token is sampled. The longer of the two times is the floor.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.harness.checkpoints import Shape
from bench.harness.paths import ROOT
from bench.harness.quiet import Quiet, wait_until_quiet
from bench.harness.repeats import BUSY_CORES
from bench.peers.engines import launch_environment

BYTES = 2
"""Bytes of a bfloat16."""
PROBES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Measured limits: bytes a second by number of threads, and bfloat16 operations a second."""

    read_one: float
    read_all: float
    multiply: float
    threads: int
    other_cores: float = 0.0
    """The most CPU, in cores, that other processes used during a probe."""

    @property
    def is_clean(self) -> bool:
        """Whether the probes were undisturbed."""
        return self.other_cores <= BUSY_CORES

    def best(self, other: Machine) -> Machine:
        """The higher limits of two measurements of one machine."""
        return Machine(
            read_one=max(self.read_one, other.read_one),
            read_all=max(self.read_all, other.read_all),
            multiply=max(self.multiply, other.multiply),
            threads=self.threads,
            other_cores=min(self.other_cores, other.other_cores),
        )

    def as_json(self) -> dict[str, float]:
        """Plain containers, for the results file."""
        return asdict(self)

    def text(self) -> str:
        """One line of text."""
        mark = "" if self.is_clean else " (disturbed)"
        return (
            f"memory reads {self.read_one / 1e9:.1f} GB/s with 1 thread and"
            f" {self.read_all / 1e9:.1f} with {self.threads}; bfloat16 matrix products"
            f" {self.multiply / 1e12:.2f} TFLOP/s{mark}"
        )


def layer_weights(shape: Shape) -> int:
    """Weights of all layers, without embedding and head."""
    key_value = shape.num_key_value_heads * shape.head_size
    attention = shape.hidden_size * (2 * shape.hidden_size + 2 * key_value)
    return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def cache_bytes(shape: Shape) -> int:
    """Bytes of the keys and values of one token."""
    return 2 * BYTES * shape.num_layers * shape.num_key_value_heads * shape.head_size


def attention_flops(shape: Shape, positions: int) -> int:
    """Attention operations of one query row over `positions` keys and values, all layers."""
    return 4 * shape.num_layers * shape.hidden_size * positions


def decode_step_seconds(shape: Shape, machine: Machine, contexts: Sequence[int]) -> float:
    """Seconds of one step that decodes a row for each context length in `contexts`."""
    head = shape.hidden_size * shape.vocab_size
    weights = layer_weights(shape) + head
    read = BYTES * weights + cache_bytes(shape) * sum(contexts)
    flops = 2 * weights * len(contexts) + attention_flops(shape, sum(contexts))
    return max(read / machine.read_all, flops / machine.multiply)


def prefill_seconds(shape: Shape, machine: Machine, prompts: Sequence[int]) -> float:
    """Seconds of one step over whole prompts of these lengths; the head runs for the last token of each."""
    head = shape.hidden_size * shape.vocab_size
    weights = layer_weights(shape)
    read = BYTES * (weights + head) + cache_bytes(shape) * sum(prompts)
    flops = 2 * (weights * sum(prompts) + head * len(prompts))
    flops += sum(attention_flops(shape, n * (n + 1) // 2) for n in prompts)
    return max(read / machine.read_all, flops / machine.multiply)


def batch_seconds(shape: Shape, machine: Machine, requests: Sequence[tuple[int, int]]) -> float:
    """Seconds for requests of (prompt, output) lengths at once: a step of all prompts, and then of decodes alone."""
    seconds = prefill_seconds(shape, machine, [length for length, _ in requests])
    for step in range(1, max(new for _, new in requests)):
        contexts = [length + step for length, new in requests if new > step]
        seconds += decode_step_seconds(shape, machine, contexts)
    return seconds


def measure(threads: int, quiet: Quiet, *, seconds: float = 1.0) -> Machine:
    """Measure on a quiet machine, in separate processes with the environment of a shard."""
    kinds = (("read", 1), ("read", threads), ("multiply", threads))
    found = [best_probe(kind, count, quiet, seconds=seconds) for kind, count in kinds]
    (read_one, _), (read_all, _), (multiply, _) = found
    return Machine(
        read_one=read_one,
        read_all=read_all,
        multiply=multiply,
        threads=threads,
        other_cores=max(others for _, others in found),
    )


def best_probe(kind: str, threads: int, quiet: Quiet, *, seconds: float) -> tuple[float, float]:
    """The median rate of the fastest of a few probes, and the cores that other processes used in it.

    A disturbance can only lower a rate, so the fastest probe is closest to the limit. The first undisturbed probe
    ends the search.
    """
    found = []
    for _ in range(PROBES):
        wait_until_quiet(quiet)
        found.append(probe(kind, threads, seconds))
        if found[-1][1] <= BUSY_CORES:
            return found[-1]
    return max(found)


def probe(kind: str, threads: int, seconds: float) -> tuple[float, float]:
    """One run of `bench.comparison.roofline_probe`."""
    environment = {**os.environ, **launch_environment(), "OMP_NUM_THREADS": str(threads)}
    answer = subprocess.run(
        [sys.executable, "-m", "bench.comparison.roofline_probe", kind, str(threads), str(seconds)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    content = json.loads(answer.stdout)
    return statistics.median(content["rates"]), content["other_cores"]
