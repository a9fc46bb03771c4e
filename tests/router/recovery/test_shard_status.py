"""Outages: how long they last, and which of them a request lived through."""

from __future__ import annotations

from millrace_router.recovery.shard_status import NUM_REMEMBERED, Outage, ShardStatus


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def outage(status: ShardStatus, clock: Clock, begin: float, end: float, *reasons: str) -> None:
    clock.now = begin
    for reason in reasons:
        status.begin_outage(reason)
    clock.now = end
    assert status.end_outage() == end - begin


def test_outages_are_cut_to_the_time_that_is_asked_for() -> None:
    clock = Clock()
    status = ShardStatus(clock=clock)
    outage(status, clock, 1.0, 3.0, "lost", "cannot connect")
    outage(status, clock, 5.0, 6.0, "hung")
    assert status.outages_between(0.0, 1.0) == status.outages_between(3.0, 5.0) == []
    assert status.outages_between(2.0, 5.5) == [
        Outage(2.0, 3.0, "lost"),
        Outage(5.0, 5.5, "hung"),
    ]


def test_an_outage_that_lasts_counts_up_to_the_end() -> None:
    clock = Clock()
    status = ShardStatus(clock=clock)
    clock.now = 2.0
    status.begin_outage("lost")
    clock.now = 4.0
    status.begin_outage("cannot connect")
    assert status.outages_between(0.0, 4.0) == [Outage(2.0, 4.0, "lost")]


def test_only_so_many_are_remembered() -> None:
    clock = Clock()
    status = ShardStatus(clock=clock)
    for number in range(NUM_REMEMBERED + 2):
        outage(status, clock, number, number + 0.5, "lost")
    found = status.outages_between(0.0, 1000.0)
    assert (len(found), found[0].began_at) == (NUM_REMEMBERED, 2.0)
