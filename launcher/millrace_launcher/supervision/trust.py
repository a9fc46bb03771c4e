"""Decides by how shards ended whether their restart keeps the loaded model and the KV store of a fork server.

A process that was killed from outside has done nothing wrong, and neither has its memory. One that crashed, hung or
failed may have written anywhere: its KV is dropped, and the weights are kept, which it cannot write to. An OOM kill
shows that memory is short, so that the store is freed, or the killer takes the router next.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

START_AGAIN = 75
"""Exit code of a shard whose group has to meet anew: the shard itself has not failed."""
INNOCENT = (-signal.SIGKILL, START_AGAIN)
"""Ends that say nothing against a process."""
WARM_RESTARTS = 2
"""Restarts without progress that keep the loaded model; further ones load it anew."""
CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
MEMINFO = Path("/proc/meminfo")


class Kept(NamedTuple):
    """The parts of a fork server that the next start uses again."""

    weights: bool
    kv: bool


NOTHING = Kept(weights=False, kv=False)


def kept_after(
    codes: Iterable[int],
    *,
    restarts: int,
    searches: int = 0,
    num_oom: int = 0,
    is_oom: bool = False,
) -> Kept:
    """Judge ranks that ended by themselves with these exit `codes`, negative for signals; none: they were to end.

    `restarts`, and the restarts of `searches` for poison requests, count from the last progress on, this one included.
    `is_oom`: an OOM kill was counted while they ran; `num_oom` starts have ended so without progress between, this one
    included.
    """
    ends = tuple(codes)
    weights = restarts <= WARM_RESTARTS and num_oom < 2
    is_innocent = bool(ends) and all(code in INNOCENT for code in ends) and not is_oom
    return Kept(weights, weights and is_innocent and restarts + searches <= 1)


def oom_kills(
    *, cgroup: Path = CGROUP, cgroups: Path = CGROUPS, vmstat: Path = VMSTAT
) -> int | None:
    """OOM kills in this process's cgroup, or on the machine where the cgroup does not count them; None if unknown."""
    for path in (_events_of(cgroup, cgroups), vmstat):
        try:
            lines = path.read_text().splitlines()
            return int(dict(line.split(maxsplit=1) for line in lines)["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def available_bytes(
    *, cgroup: Path = CGROUP, cgroups: Path = CGROUPS, meminfo: Path = MEMINFO
) -> int | None:
    """Return the memory that a further process may take, in this cgroup and on the machine; None if unknown."""
    folder, rooms = _events_of(cgroup, cgroups).parent, []
    try:
        lines = meminfo.read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        rooms.append(int(fields["MemAvailable"].split()[0]) << 10)
    except (OSError, ValueError, KeyError):
        pass
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text()) - int(stat["inactive_file"])
        rooms.append(int((folder / "memory.max").read_text()) - used)
    except (OSError, ValueError, KeyError):
        # Also without a limit, which reads `max`.
        pass
    return max(0, min(rooms)) if rooms else None


def _events_of(cgroup: Path, cgroups: Path) -> Path:
    """The file with the events of the cgroup in version 2, whose line begins with `0::`."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        lines = []
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    return cgroups / "".join(paths[:1]) / "memory.events"


class Distrust:
    """The judgement over all starts of a rank, or of a group of ranks that end together."""

    def __init__(self, oom_kills: Callable[[], int | None] = oom_kills) -> None:
        self._oom_kills = oom_kills
        self._last = oom_kills()
        self._num_oom = 0
        """OOM kills since other ends showed progress."""

    def ready(self) -> None:
        """Record that a start serves: what was killed before then says nothing of its end."""
        self._last = self._oom_kills()

    def after(self, codes: Iterable[int], *, restarts: int, searches: int = 0) -> Kept:
        """As `kept_after`, with the OOM kills since the start served. Where none are counted, any kill may be one.

        The killed process may be another rank, without which this one meets the others anew: then memory is short, too.
        """
        ends, before = tuple(codes), self._last
        self._last = self._oom_kills()
        was_killed = -signal.SIGKILL in ends
        is_oom = was_killed if self._last is None else self._last != before
        # A rank that meets the others anew is not counted as a restart.
        was_counted = any(code != START_AGAIN for code in ends)
        if is_oom and was_killed and self._last is not None:
            self._num_oom += 1
        elif not is_oom and restarts + searches <= was_counted:
            self._num_oom = 0
        return kept_after(
            ends, restarts=restarts, searches=searches, num_oom=self._num_oom, is_oom=is_oom
        )
