"""The stages in the order in which they run, and the time that each may take.

This module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOTAL_SECONDS = 585.0
"""The limit of a whole run. A stage that ignores the end of its time adds a few seconds."""
LEAST_SECONDS = 5.0
"""A stage with less time is skipped."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: a module with a function `run(setting, emit)`."""

    module: str
    """Its import path."""
    question: str
    share: float
    """Its weight in the division of TOTAL_SECONDS on a GPU; about seconds."""
    interpreted_share: float
    """The same without a GPU."""

    @property
    def name(self) -> str:
        """The name of its module."""
        return self.module.rpartition(".")[2]

    def share_on(self, device: str) -> float:
        """Its share on "cuda" or "cpu"."""
        return self.share if device == "cuda" else self.interpreted_share


STAGES = (
    Stage(
        "bench.gpu.checks.preflight",
        "Can the stages work here, and what are the limits of the device?",
        15,
        8,
    ),
    Stage("bench.gpu.checks.compilation", "Do the kernels compile, in parallel?", 95, 2),
    Stage("bench.gpu.checks.agreement", "Do the kernels agree with plain torch?", 24, 40),
    Stage(
        "bench.gpu.checks.bits",
        "Has a row the same bits alone, in company, in a prompt and in a chunk?",
        19,
        20,
    ),
    Stage("bench.gpu.checks.steps", "Do random steps yield the tokens of a shard on CPU?", 44, 25),
    Stage(
        "bench.gpu.checks.reference",
        "Are greedy tokens those of `transformers` on the same device?",
        32,
        25,
    ),
    Stage(
        "bench.gpu.checks.capture",
        "Do graphs yield what eager steps do? Is a failed capture survived?",
        25,
        75,
    ),
    Stage(
        "bench.gpu.speed.decode",
        "How close to the memory's rate is a decode, and where does a step go?",
        45,
        50,
    ),
    Stage("bench.gpu.speed.rates", "How close is each kernel to the device's peaks?", 29, 25),
    Stage("bench.gpu.speed.prefill", "How close to the matrix rate is a prefill?", 15, 28),
    Stage(
        "bench.gpu.speed.server",
        "What does HTTP leave of the engine's rate? How long is a start?",
        80,
        50,
    ),
    Stage(
        "bench.gpu.checks.verify",
        "Does `millrace-verify` hold, deterministic mode on and off?",
        79,
        55,
    ),
    Stage("bench.gpu.checks.memory", "Does a full cache with every part of sampling fit?", 25, 30),
    Stage("bench.gpu.speed.small", "What does a step cost in which the CPU's work shows?", 11, 10),
    Stage("bench.gpu.checks.faults", "Are planted faults distinguished and survived?", 22, 10),
    Stage(
        "bench.gpu.checks.sanitizer", "Does compute-sanitizer find a bad access or a race?", 32, 24
    ),
    Stage(
        "bench.gpu.speed.transformers", "How fast is `transformers`' continuous batching?", 30, 12
    ),
    Stage("bench.gpu.speed.vllm", "How fast is vLLM, if it is installed?", 10, 6),
    Stage("bench.gpu.checks.tests", "Do the tests that need a device pass?", 14, 30),
)
"""By what they reveal. Kernels that are wrong make all figures void, so their checks are first, then whole steps and
graphs; then the speeds that nothing else tells, then what a server adds, then rare failures and other programs. The
tests are last, since they take what time is left.
"""


def limit_seconds(shares: Sequence[float], left: float) -> float:
    """The limit of the first of the stages with these `shares`, when `left` seconds are left for all of them.

    A stage that ends early leaves its time to all later ones, and one that ends late takes it from all of them.
    """
    return max(0.0, left) * shares[0] / sum(shares)
