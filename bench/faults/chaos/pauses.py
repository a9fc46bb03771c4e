"""The length of a pause and its parts, from the arrivals at the clients and from the log."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from bench.faults.deployment import Line

PARTS = ("noticed", "started", "imports", "weights", "listening", "warm-up", "replay")
"""The parts of a pause, in order. Each ends with an event:

launcher or router log the fault; the last new shard is started, with back-off; it has imported everything and met the
other ranks; it has read its weights; it listens; the router has connected and warmed it up; the first client has a
new token.
"""
LOADED = re.compile(r"weights loaded in ([\d.]+) s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The pause of the clients by a fault; times in seconds of one monotonic clock."""

    fault_at: float
    resumed_at: float
    """The first new token of any stream."""
    silence: float
    """The longest time without a token over all streams together, in seconds."""
    all_moving: float | None
    """From the fault until each stream that ran had a new token, in seconds; None if one got none."""

    @property
    def first_token(self) -> float:
        """From the fault to the first new token of any stream, in seconds."""
        return self.resumed_at - self.fault_at


class Arrivals:
    """The tokens of all streams since the last fault."""

    def __init__(self) -> None:
        self._since, self._recovered_at = 0.0, math.inf
        self._streams: dict[int, list[float]] = {}
        self._running: set[int] = set()
        self.num_tokens = 0
        """Since the last start."""

    def start(self, now: float) -> None:
        """A fault: measure anew. Of the streams that run only the last token is kept."""
        self._since, self._recovered_at, self.num_tokens = now, math.inf, 0
        self._streams = {number: self._streams[number][-1:] for number in self._running}

    def token(self, stream: int, now: float) -> None:
        """A token of a stream, which has a number, arrived."""
        self._running.add(stream)
        self._streams.setdefault(stream, []).append(now)
        self.num_tokens += 1

    def end(self, stream: int) -> None:
        """A stream ended."""
        self._running.discard(stream)

    def recovered(self, now: float) -> None:
        """All processes serve: a pause that begins later has another cause, such as prompts."""
        self._recovered_at = now

    def pause(self) -> Pause | None:
        """The longest pause between the fault and the recovery; None without a token since the fault."""
        streams = list(self._streams.values())
        times = sorted(at for at in chain.from_iterable(streams) if at > self._since)
        gaps = [
            (after - before, after)
            for before, after in pairwise([self._since, *times])
            if before <= self._recovered_at
        ]
        if not gaps:
            return None
        # Tokens that were in flight at the fault may arrive before the pause begins.
        silence, resumed = max(gaps)
        moving = all_moving_at(streams, resumed=resumed, until=math.inf)
        return Pause(
            fault_at=self._since,
            resumed_at=resumed,
            silence=silence,
            all_moving=None if moving is None else moving - self._since,
        )


def all_moving_at(
    streams: Iterable[Sequence[float]], *, resumed: float, until: float
) -> float | None:
    """The time of the last stream's next token after a pause; None if a stream got none before `until`.

    `streams` holds the arrivals of each in order; `resumed` is the time of the first stream's token. Streams that had
    ended or had not begun do not count.
    """
    last = resumed
    for arrivals in streams:
        place = bisect_right(arrivals, resumed)
        if not place or place == len(arrivals):
            continue
        if arrivals[place] >= until:
            return None
        if arrivals[place - 1] != resumed:
            last = max(last, arrivals[place])
    return last


def parts(lines: Iterable[Line], *, since: float, until: float) -> dict[str, float]:
    """Seconds by part of the pause between `since` and `until`, in unix seconds; empty if a part was not logged.

    The last of several attempts or ranks counts.
    """
    between = [line for line in lines if since <= line.at <= until]
    noticed = [line.at for line in between if _notices(line)]
    started = [line.at for line in between if line.message.startswith("Starting shard")]
    loaded = [(line.at, found) for line in between if (found := LOADED.match(line.message))]
    listening = [line.at for line in between if line.message.startswith("Server started at")]
    warm = [line.at for line in between if line.message.startswith("KV cache of")]
    if not (noticed and started and loaded and listening and warm):
        return {}
    loaded_at, loading = max(loaded, key=lambda pair: pair[0])
    moments = (
        *(since, min(noticed), max(started), loaded_at - float(loading[1]), loaded_at),
        *(max(listening), max(warm), until),
    )
    seconds = (after - before for before, after in pairwise(moments))
    return dict(zip(PARTS, seconds, strict=True))


def _notices(line: Line) -> bool:
    return line.target == "millrace_launcher" or line.message == "shards failed; replaying"
