"""The processes of a server by role, recognised by their command lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from millrace_router.adapters.fetcher import MAX_AT_ONCE
from millrace_router.process import NAME
from millrace_shard.structured_output.grammar_compiler import NUM_COMPILES

GONE = (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied)


def role_of(command: Sequence[str], name: str = "") -> str | None:
    """The role of a process by its command line: `launcher`, `router`, `spare` or `shard-N`; None for anything else.

    A child counts from its fork on, when it still runs the program that becomes it. A router that waits for the end of
    another one is a spare until it has taken the `name` of a router.
    """
    if "serve" in command:
        ranks = [word.partition("=")[2] for word in command if word.startswith("--rank=")]
        return f"shard-{ranks[0] if ranks else 0}"
    if "millrace_router" in command:
        has_waited = "--is-successor" in command
        return "spare" if has_waited and name != NAME.decode() else "router"
    if "millrace_launcher" in command or any("launcher.py" in word for word in command):
        return "launcher"
    return None


@dataclass(slots=True)
class Members:
    """The launcher's descendants."""

    routers: list[int] = field(default_factory=list)
    spares: list[int] = field(default_factory=list)
    """The router that waits for the end of the one that serves."""
    ranks: dict[int, list[int]] = field(default_factory=dict)
    """Process ids by rank."""
    guards: list[int] = field(default_factory=list)
    fork_servers: list[int] = field(default_factory=list)
    """The processes that loaded the model, of which ranks are forks."""
    grammar_workers: list[int] = field(default_factory=list)
    """The process in which rank 0 compiles grammars, once one was needed, and its forks."""
    fetchers: list[int] = field(default_factory=list)
    """The processes in which the router fetches adapters."""
    others: list[str] = field(default_factory=list)
    """Command lines of other processes, and a note for each ended child without a wait."""

    @classmethod
    def of(cls, launcher: psutil.Process) -> Members:
        """The living descendants of `launcher`."""
        members = cls()
        for child in launcher.children(recursive=True):
            try:
                ended = child.status() == psutil.STATUS_ZOMBIE
                command = "ended without a wait" if ended else " ".join(child.cmdline())
                name = child.name()
            except GONE:
                continue
            members.add(child.pid, command, name)
        return members

    def add(self, pid: int, command: str, name: str = "") -> None:
        """Sort in a process by its command line, and a router by its name."""
        role = role_of(command.split(), name) or ""
        if "millrace_launcher.processes.guard" in command:
            self.guards.append(pid)
        elif "fork-server" in command:
            self.fork_servers.append(pid)
        elif "millrace_shard.structured_output.grammar_worker" in command:
            self.grammar_workers.append(pid)
        elif "millrace_router.adapters.fetching" in command:
            self.fetchers.append(pid)
        elif role == "router":
            self.routers.append(pid)
        elif role == "spare":
            self.spares.append(pid)
        elif role.startswith("shard-"):
            self.ranks.setdefault(int(role.removeprefix("shard-")), []).append(pid)
        else:
            self.others.append(command)

    def is_complete(self, num_ranks: int) -> bool:
        """Whether there is exactly one router, one guard, one process for each rank, and no other process.

        A spare router may be there.
        """
        one_each = sorted(self.ranks) == list(range(num_ranks)) and all(
            len(pids) == 1 for pids in self.ranks.values()
        )
        ones = (len(self.routers), len(self.guards), self.others) == (1, 1, [])
        few_workers = len(self.grammar_workers) <= 1 + NUM_COMPILES
        few_spares = len(self.spares) <= 1 and len(self.fetchers) <= MAX_AT_ONCE
        return one_each and ones and few_workers and few_spares

    def pids(self) -> set[int]:
        """Router and shards."""
        return {*self.routers, *(pid for pids in self.ranks.values() for pid in pids)}
