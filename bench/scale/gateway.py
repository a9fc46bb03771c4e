"""Gateways, which choose a replica for each of their requests, and what they read of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

from bench.scale.cache_index import CacheIndex
from millrace.simulate.simulated_request import Arrival

HASHED_TOKENS = 2048
"""A gateway that hashes prompts takes this many tokens of their beginning."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One sending of a request."""

    arrival: Arrival
    """As it is sent now."""
    number: int
    """Of the request in its cell."""
    asked_at: float
    """When it was sent first."""
    gateway: int = 0
    replica: int = 0
    num_uncached: int = 0
    """Prompt tokens that the gateway expects the replica to compute."""
    was_admitted: bool = False
    has_begun: bool = False
    """Whether its client has had a token, of this sending or an earlier one."""


def beginning(arrival: Arrival, number: int, hashed_tokens: int = HASHED_TOKENS) -> bytes:
    """Return the bytes of the request `number` that a gateway hashes: equal for prompts with an equal beginning.

    A group begins alike by its name, however long its prefix is. A request that shares nothing is like no other.
    """
    if arrival.chain:
        last = min(len(arrival.chain), max(1, hashed_tokens // arrival.chain_tokens)) - 1
        return b"/%d" % arrival.chain[last]
    return arrival.group.encode() if arrival.group else b"#%d" % number


POINTS = 64
"""Points of a member on the ring; more divide keys more evenly."""


def hashed(key: bytes) -> int:
    """64 bits of a hash of `key`, the same in every process."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


class Ring:
    """Members 0 … n - 1 at points of a ring.

    Rings of different names place a key independently of each other. With one name, the keys of a member of one ring
    would be near a few members of the other.
    """

    def __init__(self, num_members: int, name: bytes = b"") -> None:
        self._name = name
        points = sorted(
            (hashed(b"%d/%d" % (member, point)), member)
            for member in range(num_members)
            for point in range(POINTS)
        )
        self._places = [place for place, _ in points]
        self._members = [member for _, member in points]
        self._num_members = num_members

    def walk(self, key: bytes) -> Iterator[int]:
        """Yield every member once, in the order in which `key` prefers them."""
        start, members, seen = (
            bisect_right(self._places, hashed(self._name + key)),
            self._members,
            set[int](),
        )
        for place in range(start, start + len(members)):
            member = members[place % len(members)]
            if member not in seen:
                seen.add(member)
                yield member
                if len(seen) == self._num_members:
                    return


DOWN = 1 << 40
"""Added to the load of a replica that has failed."""


class Gateway(ABC):
    """Knows its own requests and the replicas that are up, and nothing of other gateways."""

    needs_loads = True
    """Whether its choice depends on what replicas have done so far."""

    def __init__(self, num_replicas: int, *, first: int = 0) -> None:
        """`first` is the replica that a request would go to if all are alike."""
        self._loads = [0] * num_replicas
        """Requests in flight by replica."""
        self._num_up = num_replicas
        self._num_sent = 0
        self._next = first % num_replicas

    @abstractmethod
    def choose(self, ticket: Ticket) -> int:
        """The replica for a request; at least one is up."""

    @property
    def has_replicas(self) -> bool:
        """Whether any replica is up."""
        return self._num_up > 0

    def sent(self, ticket: Ticket) -> None:
        """The replica that was chosen has accepted the request."""
        self._loads[ticket.replica] += 1
        self._num_sent += 1

    def began(self, ticket: Ticket) -> None:
        """The first token has come."""
        ticket.num_uncached = 0

    def left(self, ticket: Ticket) -> None:
        """The request has ended, or broken."""
        self._loads[ticket.replica] -= 1
        self._num_sent -= 1

    def set_up(self, replica: int, *, is_up: bool) -> None:
        """A replica has failed or is back. Health checks take no time here."""
        self._loads[replica] += -DOWN if is_up else DOWN
        self._num_up += 1 if is_up else -1

    def _has_room(self, replica: int, balance_factor: float) -> bool:
        """Whether one more request leaves the replica within so many times the mean load."""
        mean = (self._num_sent + 1) / self._num_up
        return self._loads[replica] < balance_factor * mean


class RoundRobin(Gateway):
    """Sends requests to all replicas in turn."""

    needs_loads = False

    def choose(self, ticket: Ticket) -> int:  # noqa: ARG002
        """The next replica that is up."""
        loads = self._loads
        while loads[self._next] >= DOWN:
            self._next = (self._next + 1) % len(loads)
        chosen = self._next
        self._next = (chosen + 1) % len(loads)
        return chosen


class LeastLoaded(Gateway):
    """Sends a request where the fewest are in flight; where several are alike, to these in turn."""

    def choose(self, ticket: Ticket) -> int:  # noqa: ARG002
        """The replica with the fewest requests."""
        loads = self._loads
        least = min(loads)
        try:
            chosen = loads.index(least, self._next)
        except ValueError:
            chosen = loads.index(least)
        self._next = (chosen + 1) % len(loads)
        return chosen


class PrefixHash(Gateway):
    """Hashes the beginning of the prompt, and passes over replicas whose load is beyond the bound."""

    def __init__(
        self,
        num_replicas: int,
        *,
        ring: Ring,
        balance_factor: float,
        hashed_tokens: int = HASHED_TOKENS,
    ) -> None:
        super().__init__(num_replicas)
        self._ring = ring
        self._balance_factor = balance_factor
        self._hashed_tokens = hashed_tokens

    def choose(self, ticket: Ticket) -> int:
        """The first replica on the ring, from the hash on, that has room."""
        hashed = beginning(ticket.arrival, ticket.number, self._hashed_tokens)
        walk = self._ring.walk(hashed)
        return next(replica for replica in walk if self._has_room(replica, self._balance_factor))


class KvAware(Gateway):
    """Knows what every replica has cached, and sends a request where its first token comes soonest.

    That is where the fewest prompt tokens are to be computed before: the request's tokens that are not cached, and
    the tokens of requests that this gateway has sent and that have not begun. Replicas beyond the bound are skipped.
    """

    def __init__(
        self,
        num_replicas: int,
        *,
        index: CacheIndex,
        keys_of: Callable[[Ticket], Iterable[bytes]],
        block_size: int,
        balance_factor: float,
        first: int = 0,
    ) -> None:
        super().__init__(num_replicas, first=first)
        self._index = index
        self._keys_of = keys_of
        self._block_size = block_size
        self._balance_factor = balance_factor
        self._pending = [0] * num_replicas
        """Prompt tokens to compute before the first tokens that have not come."""

    def choose(self, ticket: Ticket) -> int:
        """The replica with the fewest prompt tokens to compute; of several, the one with the fewest requests."""
        loads, pending = self._loads, self._pending
        held = self._index.num_held(self._keys_of(ticket), len(loads))
        most = self._balance_factor * (self._num_sent + 1) / self._num_up
        size, start = self._block_size, self._next
        _, _, _, chosen = min(
            (pending[replica] - size * held[replica], loads[replica], replica < start, replica)
            for replica in range(len(loads))
            if loads[replica] < most
        )
        self._next = (chosen + 1) % len(loads)
        ticket.num_uncached = ticket.arrival.prompt_tokens - size * held[chosen]
        return chosen

    def sent(self, ticket: Ticket) -> None:
        """Its prompt is to be computed."""
        super().sent(ticket)
        self._pending[ticket.replica] += ticket.num_uncached

    def began(self, ticket: Ticket) -> None:
        """Its prompt is computed."""
        self._pending[ticket.replica] -= ticket.num_uncached
        super().began(ticket)

    def left(self, ticket: Ticket) -> None:
        """Nothing of it is to be computed."""
        super().left(ticket)
        self.began(ticket)
