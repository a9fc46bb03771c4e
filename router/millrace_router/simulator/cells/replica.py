"""A replica of a cell: an engine that tells of its requests, and that can fail and come back."""

from __future__ import annotations

from collections.abc import Callable

from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.step_plan import Row
from millrace_router.simulator.cells.cache_index import CacheIndex, IndexedCache
from millrace_router.simulator.cells.ticket import Ticket
from millrace_router.simulator.deployment import Deployment
from millrace_router.simulator.engine import Engine
from millrace_router.simulator.fast_forward import num_uneventful_steps, waiting_matters
from millrace_router.simulator.simulated_request import (
    PrefixNames,
    SimulatedRequest,
    request_of,
)

_SAFE = 0.999
"""Rounding must not let a request leave before the time that `quiet_until` gives."""


class Replica(Engine):
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
        super().__init__(deployment, prefixes)
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
