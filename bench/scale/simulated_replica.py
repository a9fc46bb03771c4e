"""The replicas and gateways of a cell; a replica reports its requests' progress, and can fail and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, get_args

from bench.scale.cache_index import CacheIndex, IndexedCache
from bench.scale.fast_engine import FastEngine, num_uneventful_steps, waiting_matters
from bench.scale.fleet_metrics import FleetMetrics
from bench.scale.gateway import (
    HASHED_TOKENS,
    Gateway,
    KvAware,
    LeastLoaded,
    PrefixHash,
    Ring,
    RoundRobin,
    Ticket,
)
from millrace.simulate.deployment import Deployment
from millrace.simulate.simulated_request import (
    PrefixNames,
    SimulatedRequest,
    request_of,
)
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.step_plan import Row

_SAFE = 0.999
"""Rounding must not let a request leave before the time that `quiet_until` gives."""


class Replica(FastEngine):
    """Knows the ticket of each of its requests."""

    def __init__(
        self,
        deployment: Deployment,
        prefixes: PrefixNames,
        *,
        computed: set[bytes],
        began: Callable[[Ticket], None],
        left: Callable[[Ticket], None],
    ) -> None:
        """`computed` has the shared blocks that any replica of the cell has begun to compute."""
        super().__init__(deployment, prefixes, FleetMetrics(replicas=1))
        self.metrics: FleetMetrics
        self.tickets: dict[int, Ticket] = {}
        self._computed = computed
        self._tell_began = began
        self._tell_left = left
        self._least_ratio = _SAFE * min(deployment.step_ratios, default=1.0)

    def keep_index(self, index: CacheIndex, number: int) -> None:
        """Tell `index`, from the beginning on, what this replica, `number` of its cell, has cached."""
        if self._planner.blocks.cache is not None:
            self._planner.blocks.cache = IndexedCache(index, number)

    def send(self, ticket: Ticket) -> bool:
        """Accept a request, as `arrive` does; False if it is refused."""
        request = self.arrive(ticket.arrival)
        if ticket.asked_at < self.now:
            # It was offered before, to a replica that has failed.
            self.metrics.offered -= 1
        if request is None:
            return False
        request.asked_at = ticket.asked_at
        self.tickets[request.request_id] = ticket
        return True

    def fail(self) -> list[Ticket]:
        """Lose everything; return the tickets of the requests that were here."""
        cache = self._planner.blocks.cache
        if isinstance(cache, IndexedCache):
            cache.lose_all()
        tickets = list(self.tickets.values())
        self.tickets.clear()
        return tickets

    @property
    def quiet_until(self) -> float:
        """A time before which no request begins or leaves unless another one arrives; at least `next_event`."""
        next_event, flights = self.next_event, self._pipeline.flights
        if not flights or not self._adapters.is_settled:
            return next_event
        if any(flight.plan.chunks or flight.started for flight in flights):
            return next_event
        last_sent = self._pipeline.last_sent
        ends_at = min(self._may_end, default=last_sent)
        if ends_at <= last_sent or waiting_matters(
            self._waiting, self._planner, flights, may_expire=self._may_expire
        ):
            return next_event
        steps = min(ends_at - last_sent, num_uneventful_steps(self._planner, flights))
        if steps <= 0:
            return next_event
        # Steps grow with their context. The step that may end a row is answered after all those before it.
        after = (len(flights) - 1 + steps) * self._least_ratio * flights[-1].predicted
        return min(self._adapters.next_event, max(next_event, flights[0].answered_at + after))

    def _admitted(self, row: Row) -> None:
        super()._admitted(row)
        request = request_of(row)
        ticket, size = self.tickets[request.request_id], self._deployment.block_size
        shared, seen = request.shared_keys(), self._computed
        twice = 0
        for key in shared[row.num_cached // size :]:
            if key in seen:
                twice += size
            else:
                seen.add(key)
        if ticket.was_admitted:
            twice += row.num_inputs - max(row.num_cached, len(shared) * size)
        ticket.was_admitted = True
        self.metrics.recomputed_tokens += twice

    def _first_token(self, request: SimulatedRequest) -> None:
        ticket = self.tickets[request.request_id]
        if ticket.has_begun and request.last_token_at is None:
            # Its client has had the first token of an earlier sending.
            request.last_token_at = self.now
            self._tell_began(ticket)
            return
        super()._first_token(request)
        if not ticket.has_begun:
            ticket.has_begun = True
            self._tell_began(ticket)

    def _left(self, request: SchedulableRequest) -> None:
        self._tell_left(self.tickets.pop(request.request_id))


Routing = Literal["round-robin", "least-loaded", "prefix", "kv"]
POLICIES: tuple[Routing, ...] = get_args(Routing)


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
