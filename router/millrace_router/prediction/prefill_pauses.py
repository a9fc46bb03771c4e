"""When waiting prompts pause the decodes, as the planner has it without chunking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

_MOST_JOINS = 128
"""Entries without a free place that are played through; more ahead than that join at the rate of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRule:
    """What `Budgets` says of it."""

    waiting_served_ratio: float
    max_waiting_tokens: int

    def least(self, num_rows: int) -> int:
        """Entries for which a batch of `num_rows` pauses at once."""
        return int(num_rows * self.waiting_served_ratio)

    def num_joining(self, num_rows: int, num_fitting: int, since: float) -> int:
        """How many of those who fit join, `since` so many decodes after the last prefill."""
        is_due = not num_rows or since >= self.max_waiting_tokens
        return num_fitting if is_due or num_fitting >= self.least(num_rows) else 0


@dataclass(frozen=True, slots=True)
class Pauses:
    """Until a request joins, and with that."""

    num_decodes: float
    """Steps that decode before it joins."""
    mean_rows: float
    """Of those steps."""
    num_pauses: float
    """Steps that compute prompts before its own."""
    num_joined: int
    """Entries that join in those."""
    num_joining: int
    """Entries that join in its own."""


@dataclass(slots=True, kw_only=True)
class PausedBatch:
    """A batch whose decodes pause for prompts, played from event to event: an end, an arrival, patience spent.

    Requests arrive evenly, and prompts are of one length.
    """

    rule: PauseRule
    ends: list[float]
    """Decodes after which each row has left, from now on."""
    lengths: Iterator[float]
    """Decodes of those who join."""
    num_free: int
    """Places."""
    most_joining: int
    """Prompts that one step computes."""
    arrivals_per_decode: float
    since: float
    """Decodes since the last prefill, which counts as one."""
    num_decodes: float = 0.0
    """From now on. At least one comes after a prefill that has paused others."""
    row_decodes: float = 0.0
    """Sum over those of the rows."""

    def until_joined(self, num_ahead: int) -> Pauses:
        """For a request behind `num_ahead` others."""
        heapify(self.ends)
        num_places = max(0, self.num_free)
        num_pauses = num_joined = 0
        while True:
            self._leave()
            num_rows = len(self.ends)
            waiting = num_ahead + 1 - num_joined
            waiting += int(self.arrivals_per_decode * self.num_decodes)
            fitting = max(0, min(waiting, self.num_free, self.most_joining))
            joining = self.rule.num_joining(num_rows, fitting, self.since)
            if num_joined + joining > num_ahead:
                return self._pauses(num_pauses, num_joined, joining)
            if not joining:
                self._decode(self._decodes_until_event(waiting))
                continue
            self._join(joining)
            num_pauses, num_joined = num_pauses + 1, num_joined + joining
            if num_rows:
                self._decode(1.0)
            if num_joined >= num_places + _MOST_JOINS:
                self._go_on((num_ahead - num_places) / (num_joined - num_places))
                return self._pauses(num_pauses * num_ahead / num_joined, num_ahead, joining)

    def _decode(self, times: float) -> None:
        self.num_decodes += times
        self.since += times
        self.row_decodes += times * len(self.ends)

    def _leave(self) -> None:
        while self.ends and self.ends[0] <= self.num_decodes:
            heappop(self.ends)
            self.num_free += 1

    def _join(self, count: int) -> None:
        self.since = 1.0
        self.num_free -= count
        for _ in range(count):
            heappush(self.ends, self.num_decodes + next(self.lengths))

    def _decodes_until_event(self, waiting: int) -> float:
        """Until a row has left, enough wait, or the last prefill is long enough ago."""
        events = [self.ends[0] - self.num_decodes]
        if self.num_free > 0:
            events.append(self.rule.max_waiting_tokens - self.since)
            lacking = self.rule.least(len(self.ends)) - waiting
            if lacking > 0 and self.arrivals_per_decode > 0.0:
                arrived = self.arrivals_per_decode * self.num_decodes
                events.append((int(arrived) + lacking - arrived) / self.arrivals_per_decode)
        return float(max(1, math.ceil(min(events))))

    def _go_on(self, factor: float) -> None:
        """Decode until `factor` times as much has happened."""
        self.num_decodes *= factor
        self.row_decodes *= factor

    def _pauses(self, num_pauses: float, num_joined: int, joining: int) -> Pauses:
        mean_rows = self.row_decodes / max(1.0, self.num_decodes)
        return Pauses(self.num_decodes, mean_rows, num_pauses, num_joined, joining)
