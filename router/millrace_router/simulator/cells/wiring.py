"""The parts of a cell: gateways of one policy, and replicas that share names and an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from millrace_router.simulator.cells.cache_index import CacheIndex
from millrace_router.simulator.cells.gateway import (
    Gateway,
    KvAware,
    LeastLoaded,
    PrefixHash,
    RoundRobin,
)
from millrace_router.simulator.cells.replica import Replica
from millrace_router.simulator.cells.ring import Ring
from millrace_router.simulator.cells.ticket import HASHED_TOKENS, Ticket
from millrace_router.simulator.deployment import Deployment
from millrace_router.simulator.simulated_request import PrefixNames, SimulatedRequest

Routing = Literal["round-robin", "least-loaded", "prefix", "kv"]


class CellParts:
    """Makes the parts of one cell."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        num_replicas: int,
        num_gateways: int,
        routing: Routing,
        balance_factor: float,
        hashed_tokens: int = HASHED_TOKENS,
    ) -> None:
        """`hashed_tokens` are what `prefix` takes of a prompt's beginning."""
        self.num_replicas = num_replicas
        self._deployment = deployment
        self._num_gateways = num_gateways
        self._routing = routing
        self._balance_factor = balance_factor
        self._hashed_tokens = hashed_tokens
        self._prefixes = PrefixNames()
        self._computed: set[bytes] = set()
        self._index = CacheIndex() if routing == "kv" else None

    def gateways(self) -> list[Gateway]:
        """Gateways that share nothing; they begin their turns at replicas far from each other."""
        count, num = self._num_gateways, self.num_replicas
        firsts = [number * num // count for number in range(count)]
        match self._routing:
            case "round-robin":
                return [RoundRobin(num, first=first) for first in firsts]
            case "least-loaded":
                return [LeastLoaded(num, first=first) for first in firsts]
            case "prefix":
                ring = Ring(num)
                return [self._by_prefix(ring) for _ in firsts]
            case "kv":
                return [self._kv_aware(first) for first in firsts]

    def replica(
        self,
        number: int,
        *,
        began: Callable[[Ticket], None],
        left: Callable[[Ticket], None],
    ) -> Replica:
        """An empty replica, `number` of the cell."""
        made = Replica(
            self._deployment, self._prefixes, computed=self._computed, began=began, left=left
        )
        if self._index is not None:
            made.keep_index(self._index, number)
        return made

    def _by_prefix(self, ring: Ring) -> Gateway:
        return PrefixHash(
            self.num_replicas,
            ring=ring,
            balance_factor=self._balance_factor,
            hashed_tokens=self._hashed_tokens,
        )

    def _kv_aware(self, first: int) -> Gateway:
        assert self._index is not None
        return KvAware(
            self.num_replicas,
            index=self._index,
            keys_of=self._keys_of,
            block_size=self._deployment.block_size,
            balance_factor=self._balance_factor,
            first=first,
        )

    def _keys_of(self, ticket: Ticket) -> Iterable[bytes]:
        """Names of the blocks of its prompt that replicas may have."""
        arrival = ticket.arrival
        request = SimulatedRequest(
            0,
            arrival,
            max_new_tokens=1,
            block_size=self._deployment.block_size,
            prefixes=self._prefixes,
        )
        return request.shared_keys()
