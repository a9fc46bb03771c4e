"""The setting of parts: one model, servers on it, and the CPU that other processes use."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.command_line import say
from bench.harness.machine import CpuMeter
from bench.harness.quiet import Quiet, wait_until_quiet
from bench.harness.server import LAUNCHER, RunningServer, serving
from bench.parts.texts import Texts

MANY = 4096
"""A limit above the open requests of any part."""


@dataclass(slots=True, kw_only=True)
class Fixture:
    """The state that all parts of a run share."""

    model: Path
    texts: Texts
    most_positions: int
    """Positions of the model."""
    quick: bool
    quiet: Quiet
    out: Path
    flags: Sequence[str] = ()
    """More flags for every server."""
    repeat: int = 0
    other_cores: float = field(default=0.0, init=False)
    """The most CPU, in cores, that other processes used in this repetition."""

    def sized(self, full: int, quick: int) -> int:
        """`quick` for a quick run, else `full`."""
        return quick if self.quick else full

    def fitting(self, tokens: int) -> int:
        """`tokens`, or three quarters of the positions of a small model."""
        return min(tokens, self.most_positions * 3 // 4)

    def seed(self, name: str) -> str:
        """A seed of this repetition alone."""
        return f"{name}/{self.repeat}"

    @contextmanager
    def serving(self, *flags: str, launcher: Sequence[str] = LAUNCHER) -> Iterator[RunningServer]:
        """Our launcher for the length of the block; raises ServerError."""
        log = self.out / "scheduling.log"
        every = ["--max-batch-size=64", f"--max-concurrent-requests={MANY}", *flags, *self.flags]
        with serving(self.model, log=log, flags=every, launcher=launcher) as server:
            if not wait_until_quiet(self.quiet):
                say("the machine is not quiet: the following figures are marked as disturbed")
            meter = CpuMeter(server.processes)
            yield server
            self.other_cores = max(self.other_cores, meter.stop().other_cores)


def info(url: str) -> dict[str, Any]:
    """The server's /info, with its costs."""
    with urllib.request.urlopen(f"{url}/info?costs=true", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
