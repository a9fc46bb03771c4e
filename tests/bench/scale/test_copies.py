"""Copies of a trace are as much load as so many traces, and share nothing."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from bench.scale.traces import TraceWorkload, copied

from millrace.simulate.simulated_request import Arrival

TRACE = [
    Arrival(0.0, 600, 1, chain=(0, 1), chain_tokens=512),
    Arrival(3.0, 700, 2, group="a", prefix_tokens=5),
    Arrival(3.0, 1500, 3, chain=(0, 2, 3), chain_tokens=512),
    Arrival(6.0, 40, 4),
]
SPAN = 7.5


def test_one_copy_is_the_trace() -> None:
    assert list(copied(iter(TRACE), 1)) == TRACE
    assert list(copied(iter([]), 3)) == []


def test_copies_come_in_order_within_the_time_of_the_trace() -> None:
    found = list(copied(iter(TRACE), 3))
    assert all(one.arrived_at <= other.arrived_at for one, other in pairwise(found))
    assert 0 <= found[0].arrived_at < found[-1].arrived_at < SPAN
    assert Counter(arrival.output_tokens for arrival in found) == dict.fromkeys((1, 2, 3, 4), 3)
    times = [arrival.arrived_at for arrival in found if arrival.output_tokens == 4]
    # Each copy begins in a third of its own.
    assert sorted((at - 6.0) % SPAN // (SPAN / 3) for at in times) == [0, 1, 2]


def test_requests_in_turn_go_to_every_replica_from_every_part_of_the_trace() -> None:
    times = (0.0, 1.13, 2.31, 3.47)
    trace = [Arrival(at, 9, number) for number, at in enumerate(times, 1)]
    found = list(copied(iter(trace), 100))
    for replica in range(8):
        lengths = [arrival.output_tokens for arrival in found[replica::8]]
        assert len(lengths) == 50
        assert set(lengths) == {1, 2, 3, 4}


def test_copies_share_with_themselves_what_the_trace_shares() -> None:
    found = list(copied(iter(TRACE), 3))
    firsts = Counter(arrival.chain[0] for arrival in found if arrival.chain)
    assert sorted(firsts.values()) == [2, 2, 2]
    others = [number for arrival in found for number in arrival.chain[1:]]
    assert len(set(others)) == len(others) == 9
    assert len({arrival.group for arrival in found if arrival.group}) == 3


def test_the_beginning_of_a_trace_has_the_span_of_its_requests(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    lines = "".join(f"{second},{second},3\n" for second in (1, 2, 3, 90))
    trace.write_text(f"arrived_at,prompt_tokens,output_tokens\n{lines}", encoding="utf-8")
    arrivals = list(TraceWorkload(trace=trace, trace_requests=3, copies=2).arrivals())
    assert Counter(arrival.prompt_tokens for arrival in arrivals) == {1: 2, 2: 2, 3: 2}
    # 3 requests in 3 s have a span of 4 s.
    assert all(0 <= arrival.arrived_at < 4 for arrival in arrivals)
