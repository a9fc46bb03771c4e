"""The faults of a campaign: kinds, order, ranks and delays, all drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """A kind of fault; the value describes it."""

    KILL = "kill -9 a shard"
    SEGV = "segfault a shard"
    HANG = "stop a shard (it hangs)"
    KILL_AGAIN = "kill -9 a shard, and again while it restarts"
    KILL_IDLE = "kill -9 an idle shard"
    HANG_IDLE = "stop an idle shard"
    ROUTER = "kill -9 the router"
    ROLL = "rolling restart (SIGHUP)"
    VANISH = "clients vanish mid-answer"
    SLOW = "clients stop reading"
    MALFORMED = "malformed requests"
    OVERSIZED = "oversized requests"
    BURST = "burst past the permits"
    EXHAUST = "more KV than there is"
    LOAD = "load an adapter, and unload it while it streams"
    REPLACE = "replace an adapter while it streams"
    OVERWRITE = "overwrite an adapter's files while it streams"
    CORRUPT = "corrupt adapters"
    KILL_FETCHING = "kill -9 the process that fetches an adapter"
    KILL_LOADING = "kill -9 a shard that should load an adapter"
    POISON = "a request that breaks the steps it is in"

    @property
    def is_fatal(self) -> bool:
        """Whether it ends a process."""
        return self in _FATAL

    @property
    def needs_adapters(self) -> bool:
        """Whether the server has to have the adapters of `bench.faults.adapters`."""
        return self in _OF_ADAPTERS

    @property
    def is_idle(self) -> bool:
        """Whether it is injected into an idle server."""
        return self in {Kind.KILL_IDLE, Kind.HANG_IDLE}


_FATAL = frozenset(
    {
        Kind.KILL,
        Kind.SEGV,
        Kind.HANG,
        Kind.KILL_AGAIN,
        Kind.KILL_IDLE,
        Kind.HANG_IDLE,
        Kind.ROUTER,
        Kind.ROLL,
        Kind.KILL_LOADING,
    }
)
_OF_ADAPTERS = frozenset(
    {
        Kind.LOAD,
        Kind.REPLACE,
        Kind.OVERWRITE,
        Kind.CORRUPT,
        Kind.KILL_FETCHING,
        Kind.KILL_LOADING,
    }
)
USUAL = tuple(kind for kind in Kind if kind is not Kind.POISON)
"""All that need no test shard."""
WEIGHTS = {
    Kind.KILL: 18,
    Kind.SEGV: 8,
    Kind.HANG: 7,
    Kind.KILL_AGAIN: 6,
    Kind.KILL_IDLE: 4,
    Kind.HANG_IDLE: 3,
    Kind.ROUTER: 7,
    Kind.ROLL: 6,
    Kind.VANISH: 10,
    Kind.SLOW: 7,
    Kind.MALFORMED: 6,
    Kind.OVERSIZED: 6,
    Kind.BURST: 6,
    Kind.EXHAUST: 6,
    Kind.LOAD: 6,
    Kind.REPLACE: 6,
    Kind.OVERWRITE: 6,
    Kind.CORRUPT: 6,
    Kind.KILL_FETCHING: 6,
    Kind.KILL_LOADING: 6,
    Kind.POISON: 6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a campaign."""

    kind: Kind
    ranks: tuple[int, ...]
    """The ranks that a fault of shards hits: one, or all."""
    delay: float
    """Seconds of undisturbed load before it; a second kill waits as long after the new process appears."""
    seed: int
    """Seed of the random choices during its injection."""


def campaign(
    seed: int,
    *,
    num_faults: int,
    num_ranks: int,
    kinds: Sequence[Kind] = USUAL,
    longest_delay: float = 1.0,
) -> list[Fault]:
    """The faults in order: each of `kinds` by its weight, and at least once if `num_faults` allows.

    Delays are uniform up to `longest_delay` seconds.
    """
    drawing = random.Random(f"campaign {seed}")
    drawn = _shares(num_faults, kinds)
    drawing.shuffle(drawn)
    return [
        Fault(
            kind=kind,
            ranks=_ranks(drawing, num_ranks),
            delay=drawing.uniform(0.05, longest_delay),
            seed=drawing.getrandbits(32),
        )
        for kind in drawn
    ]


def _shares(num_faults: int, kinds: Sequence[Kind]) -> list[Kind]:
    """One of each kind, and the rest by the largest-remainder method."""
    drawn = list(kinds)[:num_faults]
    left = num_faults - len(drawn)
    total = sum(WEIGHTS[kind] for kind in kinds)
    quotas = {kind: left * WEIGHTS[kind] / total for kind in kinds}
    for kind in kinds:
        drawn += [kind] * int(quotas[kind])
    by_remainder = sorted(kinds, key=lambda kind: int(quotas[kind]) - quotas[kind])
    return drawn + by_remainder[: num_faults - len(drawn)]


def _ranks(drawing: random.Random, num_ranks: int) -> tuple[int, ...]:
    if num_ranks > 1 and drawing.random() < 0.2:
        return tuple(range(num_ranks))
    return (drawing.randrange(num_ranks),)
