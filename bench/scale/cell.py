"""Replicas that advance side by side in simulated time behind gateways, and that may fail for a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Self

from bench.scale.fleet_metrics import FleetMetrics, total
from bench.scale.gateway import Gateway, Ticket
from bench.scale.simulated_replica import CellParts, Replica
from millrace.simulate.workload import Source


@dataclass(frozen=True, slots=True)
class Failure:
    """`count` replicas fail `at` a time and are back, empty, after `seconds`; they are spread over the cells."""

    at: float
    count: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `AT:COUNT:FOR`, times in seconds.

        Raises:
            ValueError: it is something else.

        """
        try:
            at, count, seconds = text.split(":")
            failure = cls(float(at), int(count), float(seconds))
        except ValueError:
            raise ValueError(_expected(text)) from None
        if not (0 <= failure.at < math.inf and failure.count >= 1 and failure.seconds > 0):
            raise ValueError(_expected(text))
        return failure


def _expected(text: str) -> str:
    return f"{text!r} is not a failure: use AT:COUNT:FOR, such as 60:3:120"


class Cell:
    """One simulation of some replicas and their gateways. Gateways get requests in turn.

    A replica runs alone as long as nothing that a gateway sees can happen: no request begins or leaves. If the
    gateways' choice depends on that, replicas advance in the order of these times, and else when they get a request.
    """

    def __init__(self, parts: CellParts, source: Source, failures: Sequence[Failure] = ()) -> None:
        """`failures` have the counts of this cell."""
        self._parts = parts
        self._source = source
        self._gateways: list[Gateway] = parts.gateways()
        self._watched = source.waits_for_answers or any(g.needs_loads for g in self._gateways)
        self._replicas = [self._new_replica(number) for number in range(parts.num_replicas)]
        self._past: list[list[FleetMetrics]] = [[] for _ in self._replicas]
        """The figures of each replica from before its failures."""
        self._turns: list[tuple[float, int]] = []
        """(time until which a replica may be left alone, its number), as a heap; some entries are out of date."""
        self._quiet_until = [math.inf] * len(self._replicas)
        self._outages = sorted(
            (at, number, is_up)
            for failure in failures
            for number in range(failure.count)
            for at, is_up in ((failure.at, False), (failure.at + failure.seconds, True))
        )
        """(time, replica, whether it is up from then on)."""
        self._others = FleetMetrics()
        """The figures of requests that no replica got, and of broken ones."""
        self._num_sent = 0
        self._num_requests = 0

    def run(self) -> FleetMetrics:
        """Simulate all requests; return the figures of all replicas together.

        Raises:
            StuckError: the scheduler has a defect.
            TraceError: the requests come from an invalid trace.

        """
        source = self._source
        while True:
            outage_at = self._outages[0][0] if self._outages else math.inf
            at = min(source.next_at, outage_at)
            self._advance(at)
            if source.next_at < at:
                continue
            if at == math.inf:
                return self._figures()
            if outage_at <= source.next_at:
                self._outage()
            else:
                arrival = source.take()
                self._send(Ticket(arrival, self._num_requests, arrival.arrived_at))
                self._num_requests += 1

    def _advance(self, until: float) -> None:
        """Let the replicas run up to `until`; if requests wait for answers, no farther than to the first answer."""
        if not self._watched and until < math.inf:
            return
        if not self._watched:
            for replica in self._replicas:
                replica.run_until(math.inf)
            return
        turns, stepwise = self._turns, self._source.waits_for_answers
        while self._next_turn() < until:
            _, number = heappop(turns)
            replica = self._replicas[number]
            if not stepwise:
                replica.run_until(until)
                self._schedule(number)
                continue
            self._quiet_until[number] = math.inf
            if not replica.fast_forward(min(until, self._next_turn())):
                replica.step()
            self._schedule(number)
            if self._source.next_at < until:
                return

    def _next_turn(self) -> float:
        turns = self._turns
        while turns and turns[0][0] != self._quiet_until[turns[0][1]]:
            heappop(turns)
        return turns[0][0] if turns else math.inf

    def _schedule(self, number: int) -> None:
        if self._watched:
            at = self._quiet_until[number] = self._replicas[number].quiet_until
            if at < math.inf:
                heappush(self._turns, (at, number))

    def _send(self, ticket: Ticket) -> None:
        """Send a request now, which is its time of arrival."""
        now = ticket.arrival.arrived_at
        ticket.gateway = self._num_sent % len(self._gateways)
        self._num_sent += 1
        gateway = self._gateways[ticket.gateway]
        if not gateway.has_replicas:
            self._others.offered += now == ticket.asked_at
            self._others.rejected["no replica"] += 1
            self._source.left(now)
            return
        ticket.replica = gateway.choose(ticket)
        replica = self._replicas[ticket.replica]
        replica.run_until(now)
        if replica.send(ticket):
            gateway.sent(ticket)
        else:
            self._source.left(now)
        self._schedule(ticket.replica)

    def _outage(self) -> None:
        """Let the next replicas fail or come back, all that do so at one time; clients send again what has failed."""
        now = self._outages[0][0]
        broken: list[Ticket] = []
        while self._outages and self._outages[0][0] == now:
            _, number, is_up = self._outages.pop(0)
            if is_up:
                self._replicas[number] = self._new_replica(number)
            else:
                broken += self._fail(number, now)
            for gateway in self._gateways:
                gateway.set_up(number, is_up=is_up)
        for ticket in broken:
            self._others.resent += 1
            self._others.broken += ticket.has_begun
            ticket.arrival = ticket.arrival._replace(arrived_at=now)
            self._send(ticket)

    def _fail(self, number: int, now: float) -> list[Ticket]:
        replica = self._replicas[number]
        replica.run_until(now)
        self._past[number].append(replica.metrics)
        self._quiet_until[number] = math.inf
        broken = replica.fail()
        for ticket in broken:
            self._gateways[ticket.gateway].left(ticket)
        return broken

    def _new_replica(self, number: int) -> Replica:
        return self._parts.replica(number, began=self._began, left=self._left)

    def _began(self, ticket: Ticket) -> None:
        self._gateways[ticket.gateway].began(ticket)

    def _left(self, ticket: Ticket) -> None:
        self._gateways[ticket.gateway].left(ticket)
        self._source.left(self._replicas[ticket.replica].now)

    def _figures(self) -> FleetMetrics:
        each = []
        for replica, past in zip(self._replicas, self._past, strict=True):
            metrics = total([*past, replica.metrics]) if past else replica.metrics
            metrics.replicas, metrics.load_max = 1, metrics.load
            each.append(metrics)
        # They refer to this cell, and the collector of cycles may be off.
        self._replicas.clear()
        if self._others.offered or self._others.resent:
            each.append(self._others)
        return total(each)
