"""`python -m millrace_shard`, with prompts that break it.

MILLRACE_TEST_POISON has token ids such as "17,23,42". A step with a sequence whose input ids contain them fails as
MILLRACE_TEST_POISON_HOW names: `kill`, `segv`, `raise`, `hang`, `freeze` or `oom`. A step of more than
MILLRACE_TEST_OOM_ROWS rows or MILLRACE_TEST_OOM_TOKENS tokens runs out of memory. All ranks behave alike.
MILLRACE_TEST_STOP_SECONDS and MILLRACE_TEST_ABORT_SECONDS replace the constants of `serve`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, NoReturn

import torch
from torch import Tensor

from millrace_shard.__main__ import main
from millrace_shard.batch.step import Forward
from millrace_shard.batch.step_layout import StepLayout
from millrace_shard.commands import serve
from millrace_shard.engine import engine, warmup
from millrace_shard.engine.warmup import WarmedUp
from millrace_shard.model_runner.launched_step import LaunchedStep, PooledRows, PromptLogprobs
from millrace_shard.model_runner.runner import StepRunner, noop
from millrace_shard.model_runner.step_inputs import StepInputs

OUT_OF_MEMORY = "CUDA out of memory, as a test asked for"


@dataclass(frozen=True, kw_only=True)
class Poison:
    """The conditions that break a step, and the fault."""

    ids: tuple[int, ...] = ()
    how: str = "raise"
    max_rows: int | None = None
    max_tokens: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Poison:
        """Read the variables; without any, no step breaks."""
        rows, tokens = (
            environ.get(f"MILLRACE_TEST_OOM_{what}") or None for what in ("ROWS", "TOKENS")
        )
        return cls(
            ids=tuple(map(int, filter(None, environ.get("MILLRACE_TEST_POISON", "").split(",")))),
            how=environ.get("MILLRACE_TEST_POISON_HOW", "raise"),
            max_rows=None if rows is None else int(rows),
            max_tokens=None if tokens is None else int(tokens),
        )

    def is_in(self, ids: Sequence[int]) -> bool:
        """Whether `ids` contain the poison ids in a row."""
        width = len(self.ids)
        starts = range(len(ids) - width + 1) if width else range(0)
        return any(tuple(ids[start : start + width]) == self.ids for start in starts)

    def is_too_large(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step of this size runs out of memory."""
        return (self.max_rows is not None and num_rows > self.max_rows) or (
            self.max_tokens is not None and num_tokens > self.max_tokens
        )

    def act(self) -> NoReturn:
        """Cause the fault."""
        match self.how:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "freeze":
                # Holds the interpreter's lock, so that the shard does not answer health checks.
                ctypes.PyDLL(None).pause()
            case "oom":
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            case "raise":
                raise RuntimeError("poisoned")
        # A signal to this process may still be pending.
        Event().wait()
        raise AssertionError


def install(poison: Poison) -> None:
    """Apply `poison` to the forward passes of every runner of this process, except in a warm-up."""
    launch, forward, warm_up = StepRunner.launch, StepRunner._forward, warmup.warm_up
    carriers: set[int] = set()
    warming: list[bool] = []

    def poisoned_launch(
        self: StepRunner, step: Forward, on_ready: Callable[[], None] = noop
    ) -> LaunchedStep:
        for sequence in step.change.admitted:
            carriers.discard(sequence.slot)
            if poison.is_in(sequence.input_ids.tolist()):
                carriers.add(sequence.slot)
        return launch(self, step, on_ready)

    def poisoned_forward(
        self: StepRunner, layout: StepLayout, inputs: StepInputs
    ) -> tuple[Tensor, PromptLogprobs | None, PooledRows | None]:
        if not warming:
            if poison.is_too_large(len(layout.slots), int(layout.counts.sum())):
                raise torch.OutOfMemoryError(OUT_OF_MEMORY)
            if not carriers.isdisjoint(layout.slots.tolist()):
                poison.act()
        return forward(self, layout, inputs)

    def quiet_warm_up(*args: Any, **kwargs: Any) -> WarmedUp:
        warming.append(True)
        try:
            return warm_up(*args, **kwargs)
        finally:
            warming.clear()

    StepRunner.launch = poisoned_launch  # type: ignore[method-assign]
    StepRunner._forward = poisoned_forward  # type: ignore[method-assign]
    vars(engine)["warm_up"] = quiet_warm_up


def poisoned_main(arguments: Sequence[str] | None = None) -> int:
    """Run `millrace_shard.__main__.main` with the poison and the seconds of the environment."""
    install(Poison.from_environment(os.environ))
    for name in ("STOP_SECONDS", "ABORT_SECONDS"):
        if (value := os.environ.get(f"MILLRACE_TEST_{name}")) is not None:
            vars(serve)[name] = float(value)
    return main(arguments)


if __name__ == "__main__":
    sys.exit(poisoned_main())
