"""The faults of a campaign: kinds, order, ranks and delays, all drawn from its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Traits:
    """The properties of a kind of fault."""

    text: str
    weight: int
    """Its share of a campaign's faults."""
    is_fatal: bool = False
    """Whether it ends a process."""
    is_idle: bool = False
    """Whether it is injected into an idle server."""
    needs_adapters: bool = False
    """Whether the server has to have the adapters of `bench.faults.adapters`."""


class Kind(Enum):
    """A kind of fault."""

    KILL = Traits("kill -9 a shard", 18, is_fatal=True)
    SEGV = Traits("segfault a shard", 8, is_fatal=True)
    HANG = Traits("stop a shard (it hangs)", 7, is_fatal=True)
    KILL_AGAIN = Traits("kill -9 a shard, and again while it restarts", 6, is_fatal=True)
    KILL_IDLE = Traits("kill -9 an idle shard", 4, is_fatal=True, is_idle=True)
    HANG_IDLE = Traits("stop an idle shard", 3, is_fatal=True, is_idle=True)
    ROUTER = Traits("kill -9 the router", 7, is_fatal=True)
    HAND_OVER = Traits("replace the router (SIGUSR2)", 7, is_fatal=True)
    UNLINK = Traits("remove the shards' sockets, and kill -9 the router", 3, is_fatal=True)
    ROLL = Traits("rolling restart (SIGHUP)", 6, is_fatal=True)
    SLOWED = Traits("slow a shard to a twentieth", 3)
    VANISH = Traits("clients vanish mid-answer", 10)
    SLOW = Traits("clients stop reading", 7)
    MALFORMED = Traits("malformed requests", 6)
    OVERSIZED = Traits("oversized requests", 6)
    CROWD = Traits("connections with unfinished headers and bodies", 6)
    BURST = Traits("burst past the permits", 6)
    EXHAUST = Traits("more KV than there is", 6)
    LOAD = Traits("load an adapter, and unload it while it streams", 6, needs_adapters=True)
    REPLACE = Traits("replace an adapter while it streams", 6, needs_adapters=True)
    OVERWRITE = Traits("overwrite an adapter's files while it streams", 6, needs_adapters=True)
    CORRUPT = Traits("corrupt adapters", 6, needs_adapters=True)
    KILL_FETCHING = Traits("kill -9 the process that fetches an adapter", 6, needs_adapters=True)
    KILL_LOADING = Traits(
        "kill -9 a shard that should load an adapter", 6, is_fatal=True, needs_adapters=True
    )
    POISON = Traits("a request that breaks the steps it is in", 6)


USUAL = tuple(kind for kind in Kind if kind is not Kind.POISON)
"""All that need no test shard."""


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
    total = sum(kind.value.weight for kind in kinds)
    quotas = {kind: left * kind.value.weight / total for kind in kinds}
    for kind in kinds:
        drawn += [kind] * int(quotas[kind])
    by_remainder = sorted(kinds, key=lambda kind: int(quotas[kind]) - quotas[kind])
    return drawn + by_remainder[: num_faults - len(drawn)]


def _ranks(drawing: random.Random, num_ranks: int) -> tuple[int, ...]:
    if num_ranks > 1 and drawing.random() < 0.2:
        return tuple(range(num_ranks))
    return (drawing.randrange(num_ranks),)
