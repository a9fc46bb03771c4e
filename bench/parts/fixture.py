"""Where parts run: one model, a server when they ask for one, and an eye on who else uses the machine."""

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
from bench.harness.server import RunningServer, serving
from bench.parts.texts import Texts

MANY = 4096
"""More requests than any part has open at once."""


@dataclass(slots=True, kw_only=True)
class Fixture:
    """What every part of a run shares."""

    model: Path
    texts: Texts
    most_positions: int
    """Positions that the model was made for."""
    quick: bool
    quiet: Quiet
    out: Path
    flags: Sequence[str] = ()
    """More of them, for every server."""
    repeat: int = 0
    other_cores: float = field(default=0.0, init=False)
    """The most that others used while a server of this repetition was measured."""

    def sized(self, full: int, quick: int) -> int:
        """One of the two, by what was asked for."""
        return quick if self.quick else full

    def fitting(self, tokens: int) -> int:
        """So many tokens, or what a small model has room for beside a short answer."""
        return min(tokens, self.most_positions * 3 // 4)

    def seed(self, name: str) -> str:
        """A seed that no other repetition has."""
        return f"{name}/{self.repeat}"

    @contextmanager
    def serving(self, *flags: str) -> Iterator[RunningServer]:
        """Our launcher for the length of the block; raises ServerError."""
        log = self.out / "scheduling.log"
        every = ["--max-batch-size=64", f"--max-concurrent-requests={MANY}", *flags, *self.flags]
        with serving(self.model, log=log, flags=every) as server:
            if not wait_until_quiet(self.quiet):
                say("the machine is not quiet: what follows is marked as disturbed")
            meter = CpuMeter(server.processes)
            yield server
            self.other_cores = max(self.other_cores, meter.stop().other_cores)


def info(url: str) -> dict[str, Any]:
    """The server's /info."""
    with urllib.request.urlopen(f"{url}/info", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found
