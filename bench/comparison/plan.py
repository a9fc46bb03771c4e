"""The settings of a run, and the handling of a peer that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.harness.command_line import say
from bench.harness.quiet import Quiet
from bench.harness.server import ServerError
from bench.peers.engines import OFFLINE, OURS, ConversionError, Offline
from bench.peers.process import EngineError
from bench.peers.servers import SERVERS, Server

FAILURES = (EngineError, ServerError, ConversionError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All settings of a run except its requests."""

    engines: Sequence[str]
    """Names of the engines and servers that take part, if installed."""
    repeats: int
    threads: int
    quiet: Quiet
    out: Path
    launcher_flags: Sequence[str] = ()
    shard_flags: Sequence[str] = ()
    more_offline: Sequence[Offline] = ()
    """Engines without HTTP in addition to `engines`."""
    more_servers: Sequence[Server] = ()
    """Servers in addition to `engines`."""


def installed(names: Sequence[str]) -> list[str]:
    """The installed ones among `names`, in the same order."""
    present = {engine.name for engine in OFFLINE if engine.is_installed}
    present |= {server.name for server in SERVERS if server.is_installed}
    return [name for name in names if name in present]


class Attempt:
    """A block in which the failure of a peer becomes a note; a failure of ours is raised."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.failed = False
        self._name = name
        self._notes = notes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self._name == OURS or not isinstance(error, FAILURES):
            return False
        self.failed = True
        lines = str(error).splitlines()
        self._notes.append(f"{self._name} took no further part: {lines[0]} {lines[-1]}")
        say(f"{self._name}: {error}")
        return True
