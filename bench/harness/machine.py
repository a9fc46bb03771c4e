"""The machine, and the CPU that each process uses."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import psutil

from bench.harness.paths import ROOT
from millrace_proto.cores import cpu_fact


def describe() -> dict[str, str]:
    """The facts that a figure depends on, for the results file."""
    return {
        "cpu": _cpu_model(),
        "family": cpu_family() or "unknown",
        "cores": f"{psutil.cpu_count(logical=False)} physical, {os.cpu_count()} logical",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "aiohttp", "grpcio")},
        "commit": _commit(),
    }


CAPABILITY = "ATEN_CPU_CAPABILITY"
"""Environment variable that holds torch and our kernels to an instruction set."""
FAMILIES = ("Zen 4", "Zen 5", "Xeon with AMX", "Xeon without AMX", "AVX2 with VNNI", "AVX2")
AMD_FAMILIES = {"25": "Zen 4", "26": "Zen 5"}
"""Families with AVX-512, as Linux numbers them."""


def cpu_family(
    fact: Callable[[str], str] = cpu_fact, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The one of `FAMILIES`, in which figures are compared; None for another CPU.

    A CPU that is held to AVX2 counts as one without AVX-512.
    """
    flags, vendor = set(fact("flags").split()), fact("vendor_id")
    if "avx512f" not in flags or environ.get(CAPABILITY, "").lower() == "avx2":
        if "avx2" not in flags:
            return None
        return "AVX2 with VNNI" if "avx_vnni" in flags else "AVX2"
    # Zen 6 has the family of Zen 5 and half-precision arithmetic.
    if vendor == "AuthenticAMD" and "avx512_fp16" not in flags:
        return AMD_FAMILIES.get(fact("cpu family"))
    if vendor == "GenuineIntel" and "Xeon" in fact("model name"):
        return "Xeon with AMX" if "amx_tile" in flags else "Xeon without AMX"
    return None


def _cpu_model() -> str:
    return cpu_fact("model name") or platform.processor() or platform.machine()


def _commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "not a checkout"


def cpu_seconds(processes: Iterable[psutil.Process], *, with_ended: bool = False) -> float:
    """User and system time of the living processes; `with_ended` adds their ended children."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
        if with_ended:
            total += times.children_user + times.children_system
    return total


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process and its living descendants."""
    return [process, *process.children(recursive=True)]


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Cores' worth of CPU over a stretch of time."""

    wall_seconds: float
    client_cores: float
    server_cores: float
    other_cores: float


class CpuMeter:
    """Splits the machine's CPU time into this process, a server's processes and the rest."""

    def __init__(self, server: Callable[[], list[psutil.Process]]) -> None:
        self._server = server
        self._client = psutil.Process()
        self._start = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        return (
            time.perf_counter(),
            cpu_seconds([self._client]),
            cpu_seconds(self._server(), with_ended=True),
            _busy_seconds(),
        )

    def stop(self) -> CpuUse:
        """The use since construction."""
        wall, client, server, busy = (
            after - before for before, after in zip(self._start, self._read(), strict=True)
        )
        others = max(0.0, busy - client - server)
        return CpuUse(wall, client / wall, server / wall, others / wall)


END_SECONDS = 20.0


class Family:
    """A process of ours and all its descendants."""

    def __init__(self, pid: int) -> None:
        self._process: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    def processes(self) -> list[psutil.Process]:
        """The living members; empty once the first process has ended."""
        if self._process is None:
            return []
        try:
            return family(self._process)
        except psutil.NoSuchProcess:
            return []

    def freeze(self) -> None:
        """Stop every member, parents first, so that no parent restarts a child."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        """Let all members continue."""
        for process in reversed(self.processes()):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def end(self) -> None:
        """Send SIGTERM to all, then SIGKILL to the rest, because workers may outlive their parent."""
        processes = self.processes()
        for signal in (psutil.Process.terminate, psutil.Process.kill):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    signal(process)
                    process.resume()
            _, processes = psutil.wait_procs(processes, timeout=END_SECONDS)
