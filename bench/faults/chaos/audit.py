"""The rules of the audit: for answers, for an idle server, and for the resources of its processes."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import psutil

from bench.faults.adapters import MAX_LORAS

MAX_SHOWN = 30
IDLE_SERIES = (
    "millrace_kv_blocks_in_use",
    "millrace_requests_running",
    "millrace_requests_waiting",
    "millrace_requests_paused",
    "tgi_queue_size",
    "tgi_batch_current_size",
)
"""Gauges that are 0 on an idle server."""
ADAPTERS_INFO = "vllm:lora_requests_info"
SLACK_FDS = 6
SLACK_THREADS = 8
MEMORY_GROWTH = 96 * 2**20
"""Bytes by which a process may grow: caches of prompts, buffers of bursts, fragmentation."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The resources of a process at one moment."""

    resident: int
    """Bytes that it does not share with others, so without the KV store."""
    num_fds: int
    num_threads: int


def read(processes: Mapping[str, psutil.Process]) -> dict[str, Reading]:
    """A reading of each process that lives, by role."""
    found = {}
    for role, process in processes.items():
        try:
            resident = process.memory_full_info().uss
            num_fds, num_threads = process.num_fds(), process.num_threads()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found[role] = Reading(resident, num_fds, num_threads)
    return found


@dataclass(slots=True)
class Ledger:
    """Outcomes of requests, their latencies, and problems."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """The text of the first ones."""
    num_problems: int = 0
    seconds: defaultdict[str, array[float]] = field(
        default_factory=lambda: defaultdict(lambda: array("d"))
    )
    """Latencies by what they are of."""

    def count(self, outcome: str, number: int = 1) -> None:
        """Count so many more of this outcome."""
        self.outcomes[outcome] += number

    def wrong(self, problem: str) -> None:
        """Add a violation."""
        self.num_problems += 1
        if len(self.problems) < MAX_SHOWN:
            self.problems.append(problem)


def not_idle(metrics: Mapping[str, float]) -> list[str]:
    """Gauges of an idle server that are not 0, and violations of the number of blocks."""
    found = [
        f"{name} is {value:g}" for name in IDLE_SERIES if (value := metrics.get(name, 0.0)) != 0
    ]
    found += _busy_adapters(metrics)
    cached, total = metrics.get("millrace_kv_blocks_cached", 0.0), metrics.get("millrace_kv_blocks")
    if total is None:
        found.append("millrace_kv_blocks is missing")
    elif cached > total:
        found.append(f"{cached:g} of {total:g} KV blocks are cached")
    return found


def _busy_adapters(metrics: Mapping[str, float]) -> list[str]:
    """Adapters that are said to run or wait, and more resident ones than there may be."""
    resident = metrics.get("millrace_adapters_resident", 0.0)
    found = [f"{resident:g} adapters are resident"] if resident > MAX_LORAS else []
    for series in metrics:
        if series.startswith(ADAPTERS_INFO):
            names = re.findall(r'(\w+)_lora_adapters="([^"]+)"', series)
            found += [f"{state} adapters are {which}" for state, which in names]
    return found


def leaks(name: str, before: Reading, after: Reading) -> list[str]:
    """Resources of which a process holds more than before, beyond the slack."""
    found = []
    if after.num_fds > before.num_fds + SLACK_FDS:
        found.append(f"{name} has {after.num_fds} file descriptors, {before.num_fds} before")
    if after.num_threads > before.num_threads + SLACK_THREADS:
        found.append(f"{name} has {after.num_threads} threads, {before.num_threads} before")
    if after.resident > before.resident + MEMORY_GROWTH:
        grown = (after.resident - before.resident) / 2**20
        found.append(f"{name} has grown by {grown:.0f} MiB, over {MEMORY_GROWTH / 2**20:.0f}")
    return found


def refusal_flaws(
    headers: Mapping[str, str], body: object, *, error_type: str = "overloaded"
) -> list[str]:
    """Violations in a 429 or 503, which must have a `Retry-After` and its error type."""
    found = []
    after = headers.get("retry-after", "")
    if not (after.isdecimal() and int(after) >= 1):
        found.append(f"{error_type} with Retry-After {after!r}")
    if not isinstance(body, dict) or body.get("error_type") != error_type:
        found.append(f"{error_type} with {body!r}")
    return found
