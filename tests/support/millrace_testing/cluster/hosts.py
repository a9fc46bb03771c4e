"""Hosts with addresses of their own and links that can be cut: network namespaces on a bridge. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

BRIDGE = "mr-bridge"
NETWORK = "10.213.7"
"""A network of this machine alone."""
END_SECONDS = 60


def missing() -> str:
    """What this machine lacks for such hosts; empty if nothing."""
    if shutil.which("ip") is None:
        return "no program `ip`"
    if os.geteuid() != 0:
        return "not root"
    # Containers have a root that may make none.
    probe = f"millrace-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", probe], check=False, capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)
    return "" if made.returncode == 0 else made.stderr.strip()


def ip(*arguments: str, check: bool = True) -> None:
    """Run `ip`."""
    subprocess.run(["ip", *arguments], check=check, capture_output=True)


@dataclass
class Program:
    """A program on a host, and what it prints."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(END_SECONDS)


class Host:
    """A namespace with one address."""

    def __init__(self, number: int) -> None:
        self.name = f"mr-host{number}"
        self.address = f"{NETWORK}.{10 + number}"
        self._link = f"mr-link{number}"
        # `ip netns exec` puts its files in the place of those in /etc.
        self._etc = Path("/etc/netns", self.name)
        self._programs: list[Program] = []

    def make(self) -> None:
        """Make it and join it to the bridge."""
        self._forget_names()
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("link", "set", self._link, "master", BRIDGE, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", self.name, "link", "set", device, "up")
        ip("-n", self.name, "route", "add", "default", "via", f"{NETWORK}.1")

    def remove(self) -> None:
        """End what runs on it, and remove it."""
        self.kill()
        ip("netns", "delete", self.name, check=False)
        shutil.rmtree(self._etc, ignore_errors=True)
        # Its last connections may keep the namespace for a while.
        ip("link", "delete", self._link, check=False)

    def _forget_names(self) -> None:
        """Ask no name server, which it could not reach: ranks look up each other's names, and would wait for 10 s."""
        with suppress(OSError):
            self._etc.mkdir(parents=True, exist_ok=True)
            Path(self._etc, "nsswitch.conf").write_text("hosts: files\n")

    def cut(self) -> None:
        """Cut its link: nobody on it is told."""
        ip("link", "set", self._link, "down")

    def mend(self) -> None:
        """Join it again."""
        ip("link", "set", self._link, "up")

    def start(self, *argv: str, environment: Mapping[str, str] | None = None) -> Program:
        """Run a program on it."""
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})}
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **variables},
            start_new_session=True,
        )
        program = Program(process)
        self._programs.append(program)
        Thread(target=_pump, args=(program,), daemon=True).start()
        return program

    def python(self, *argv: str, environment: Mapping[str, str] | None = None) -> Program:
        """Run this Python on it."""
        return self.start(sys.executable, *argv, environment=environment)

    def pids(self) -> list[int]:
        """All processes on it."""
        answer = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        return [int(word) for word in answer.stdout.split()]

    def kill(self) -> None:
        """It loses power: all of its processes are killed."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for program in self._programs:
                program.process.poll()
        for program in self._programs:
            program.process.wait(END_SECONDS)
        self._programs.clear()


def words_of(pid: int) -> list[str]:
    """The command of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def ranks_on(hosts: Sequence[Host]) -> dict[str, int]:
    """How many ranks each host runs, without their fork servers."""
    words = {"millrace_shard", "serve"}
    return {host.name: sum(words <= set(words_of(pid)) for pid in host.pids()) for host in hosts}


def _pump(program: Program) -> None:
    stream = program.process.stdout
    assert stream is not None
    with stream:
        program.lines.extend(line.rstrip("\n") for line in stream)


@contextmanager
def hosts(count: int) -> Iterator[Sequence[Host]]:
    """So many hosts, which reach each other and this machine."""
    with ExitStack() as stack:
        ip("link", "delete", BRIDGE, check=False)
        ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(ip, "link", "delete", BRIDGE)
        ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        found = []
        for number in range(count):
            host = Host(number)
            host.remove()
            host.make()
            stack.callback(host.remove)
            found.append(host)
        yield found
