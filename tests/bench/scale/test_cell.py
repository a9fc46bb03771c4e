"""Replicas side by side: against a cell that lets every replica take each step by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
from bench.scale.cell import Cell, Failure
from bench.scale.fleet_metrics import FleetMetrics
from bench.scale.simulated_replica import CellParts, Routing
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.simulate.deployment import Deployment
from millrace.simulate.metrics import Distribution
from millrace.simulate.simulated_request import Arrival
from millrace.simulate.workload import OpenLoop

COST_MODEL = {
    "step": 0.011,
    "decode_row": 0.00013,
    "decode_context_token": 1e-7,
    "prefill_step": 0.003,
    "prefill_token": 0.0001,
    "prefill_pair": 0.0,
}


def deployment(**changes: Any) -> Deployment:
    values = {
        "cost_model": COST_MODEL,
        "num_blocks": 60,
        "block_size": 16,
        "max_total_tokens": 512,
        "step_ratios": (1.0, 1.3, 0.8),
    }
    return Deployment.model_validate(values | changes)


def parts(routing: Routing, *, replicas: int = 3, gateways: int = 1, **changes: Any) -> CellParts:
    return CellParts(
        deployment(**changes),
        num_replicas=replicas,
        num_gateways=gateways,
        routing=routing,
        balance_factor=1.25,
    )


class PlainCell(Cell):
    """Advances every replica step by step up to each arrival, without fast-forward."""

    def _advance(self, until: float) -> None:
        while True:
            replica = min(self._replicas, key=lambda each: each.next_event)
            if replica.next_event >= until:
                return
            replica.step()


def simulated(kind: type[Cell], made: CellParts, arrivals: list[Arrival]) -> FleetMetrics:
    return kind(made, OpenLoop(iter(arrivals))).run()


@st.composite
def workloads(draw: st.DrawFn) -> list[Arrival]:
    now, arrivals = 0.0, []
    for _ in range(draw(st.integers(1, 40))):
        now += draw(st.sampled_from([0.0, math.sqrt(2) / 50, math.sqrt(3) / 3, 2.1]))
        group = draw(st.sampled_from(["", "a", "b", "c"]))
        arrivals.append(
            Arrival(
                now,
                prompt_tokens=draw(st.integers(1, 200)),
                output_tokens=draw(st.integers(1, 120)),
                max_new_tokens=draw(st.one_of(st.none(), st.integers(1, 60))),
                group=group,
                prefix_tokens=draw(st.integers(0, 150)) if group else 0,
            )
        )
    return arrivals


COUNTS = ("offered", "finished", "output_tokens", "load_max", "steps", "preemptions")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["round-robin", "least-loaded", "prefix"]), st.integers(1, 2), workloads())
def test_replicas_left_alone_end_as_those_watched_at_every_step(
    routing: Routing, gateways: int, arrivals: list[Arrival]
) -> None:
    fast, slow = (
        simulated(kind, parts(routing, gateways=gateways), arrivals) for kind in (Cell, PlainCell)
    )
    for name in COUNTS:
        assert getattr(fast, name) == getattr(slow, name), name
    for name in ("first_token", "latency", "between_tokens"):
        one, other = getattr(fast, name), getattr(slow, name)
        assert isinstance(one, Distribution)
        assert one.count == other.count
        assert one.mean == pytest.approx(other.mean)


def spaced(count: int, *, group: str = "", apart: float = 0.05) -> list[Arrival]:
    prefix = 160 if group else 0
    return [
        Arrival(apart * number, 200, 40, 40, group=group, prefix_tokens=prefix)
        for number in range(count)
    ]


def test_tokens_are_computed_twice_where_several_replicas_compute_them() -> None:
    arrivals = spaced(30, group="a", apart=2.0)
    spread = simulated(Cell, parts("round-robin"), arrivals)
    gathered = simulated(Cell, parts("kv"), arrivals)
    # Each of three replicas computes the ten blocks of the group once.
    assert spread.recomputed_tokens == 2 * 160
    assert gathered.recomputed_tokens == 0
    assert spread.prefill_tokens == 30 * 200 - 27 * 160
    assert gathered.prefill_tokens == 30 * 200 - 29 * 160
    assert gathered.cached_tokens == 29 * 160


def test_load_is_compared_over_replicas() -> None:
    arrivals = spaced(30)
    even = simulated(Cell, parts("round-robin"), arrivals)
    assert even.load_max * 3 == even.load == 30 * 240
    one = simulated(Cell, parts("round-robin"), arrivals[:1])
    assert (one.load_max, one.load, one.replicas) == (240, 240, 3)


def failing(routing: Routing, *failures: Failure, replicas: int = 3) -> FleetMetrics:
    cell = Cell(parts(routing, replicas=replicas), OpenLoop(iter(spaced(60))), failures)
    return cell.run()


@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix", "kv"])
def test_what_a_failed_replica_had_is_sent_again_and_finishes(routing: Routing) -> None:
    whole, hurt = failing(routing), failing(routing, Failure(1.0, 2, 1.5))
    assert hurt.offered == hurt.finished == 60
    assert hurt.output_tokens == whole.output_tokens == 60 * 40
    assert hurt.first_token.count == 60
    assert 0 < hurt.broken <= hurt.resent
    assert hurt.recomputed_tokens > 0
    assert hurt.latency.mean > whole.latency.mean
    # A request that is sent again waits from its first sending on.
    assert hurt.latency.percentile(100) > whole.latency.percentile(100)


def test_a_stream_without_a_token_does_not_break() -> None:
    cell = Cell(
        parts("round-robin", replicas=2), OpenLoop(iter(spaced(1))), (Failure(1e-4, 1, 1.0),)
    )
    hurt = cell.run()
    assert (hurt.resent, hurt.broken, hurt.finished) == (1, 0, 1)


def test_a_replica_that_is_back_gets_its_share_again() -> None:
    before = [Arrival(0.01 * number, 200, 40, 40) for number in range(10)]
    after = [Arrival(10.0 + 2.0 * number, 200, 40, 40) for number in range(60)]
    source = OpenLoop(iter([*before, *after]))
    hurt = Cell(parts("least-loaded", replicas=2), source, (Failure(0.1, 1, 1.0),)).run()
    assert hurt.resent > 0
    assert hurt.load_max < 0.6 * hurt.load


def test_without_any_replica_requests_are_refused_until_one_is_back() -> None:
    hurt = failing("least-loaded", Failure(1.0, 3, 1.0))
    # From second 1 to before 2 there are 20 arrivals, and whatever was in progress is sent again at once.
    assert hurt.rejected["no replica"] == 20 + hurt.resent
    assert hurt.finished == 40 - hurt.resent
    assert hurt.offered == 60


def test_a_failure_is_read_from_text() -> None:
    assert Failure.parse("60:3:120") == Failure(60.0, 3, 120.0)
    for text in ("60:3", "x:3:1", "60:0:1", "60:1:0", "-1:1:1", "inf:1:1", "1:1.5:2"):
        with pytest.raises(ValueError, match="not a failure: use AT:COUNT:FOR"):
            Failure.parse(text)
