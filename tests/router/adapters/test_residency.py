"""Slots, pages and turns of adapters under random histories, and the rules one by one."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.adapters.residency import Residency
from millrace_router.adapters.slots import AdapterSlot
from millrace_testing.adapters.fake_adapters import version_of
from millrace_testing.adapters.histories import History

NUM_HISTORIES = int(os.environ.get("MILLRACE_RESIDENCY_HISTORIES", "300"))


@settings(max_examples=NUM_HISTORIES, deadline=None)
@given(st.integers(0, 2**48), st.integers(1, 60))
def test_waits_are_bounded_and_slots_and_pages_conserved(seed: int, num_arrivals: int) -> None:
    History(seed).run(num_arrivals)


def test_histories_reach_expulsions_restarts_and_long_waits() -> None:
    """A bound that is never approached proves little."""
    histories = [History(seed) for seed in range(120)]
    for history in histories:
        history.run(50)
    assert sum(history.num_expelled for history in histories) > 50
    assert sum(history.num_restarts for history in histories) > 20
    assert max(history.longest_wait / history.turn for history in histories) > 1.5


def resident(residency: Residency, name: str, now: float, *, num_pages: int = 1) -> AdapterSlot:
    """A place that a request uses."""
    version = version_of(name)
    assert residency.request(version, num_pages) is None
    (slot,) = residency.advance(now).loads
    residency.loaded(slot, now)
    assert slot.num_users == 1
    return slot


def test_the_least_recently_used_idle_slot_is_evicted() -> None:
    residency = Residency(max_adapters=3, num_pages=9, cycle_seconds=1.0)
    slots = [resident(residency, name, 0.0) for name in "abc"]
    for slot in slots:
        residency.release(slot)
    residency.hold(slots[0])
    residency.release(slots[0])
    residency.request(version_of("d"), 1)
    assert residency.advance(1.0).unloads == [slots[1]]
    assert not residency.advance(1.0).unloads, "one victim is enough"


def test_as_many_idle_adapters_are_evicted_as_pages_are_missing() -> None:
    residency = Residency(max_adapters=9, num_pages=6, cycle_seconds=1.0)
    slots = [resident(residency, name, 0.0, num_pages=2) for name in "abc"]
    residency.release(slots[0])
    residency.release(slots[2])
    residency.request(version_of("d"), 3)
    assert residency.advance(1.0).unloads == [slots[0], slots[2]]


def test_a_busy_slot_is_closed_after_one_cycle_and_expelled_after_another() -> None:
    residency = Residency(max_adapters=2, num_pages=9, cycle_seconds=2.0)
    old = resident(residency, "a", 0.0)
    young = resident(residency, "b", 1.0)
    residency.request(version_of("c"), 1)
    residency.advance(1.5)
    assert [old.is_open, young.is_open] == [True, True]
    assert residency.next_event(1.5) == 2.0
    residency.advance(2.0)
    assert [old.is_open, young.is_open] == [False, True]
    assert residency.request(old.version, 1) is None, "a closed place takes no request"
    states = []
    for now in (3.9, 4.0):
        residency.advance(now)
        states.append(old.is_expelled)
    assert states == [False, True]
    residency.release(old)
    assert residency.advance(4.1).unloads == [old]


def test_a_closed_slot_opens_again_when_no_request_waits_for_its_room() -> None:
    residency = Residency(max_adapters=2, num_pages=9, cycle_seconds=2.0)
    old, young = resident(residency, "a", 0.0), resident(residency, "b", 0.5)
    residency.request(version_of("c"), 1)
    residency.advance(2.0)
    assert [old.is_open, young.is_open] == [False, True]
    residency.leave(version_of("c").digest)
    residency.advance(2.1)
    assert old.is_open


def test_a_small_adapter_does_not_overtake_a_large_one() -> None:
    residency = Residency(max_adapters=9, num_pages=4, cycle_seconds=2.0)
    resident(residency, "a", 0.0, num_pages=3)
    residency.request(version_of("large"), 4)
    residency.request(version_of("small"), 1)
    assert not residency.advance(0.3).loads


def test_no_more_loads_than_allowed_run_at_a_time() -> None:
    residency = Residency(max_adapters=9, num_pages=9, cycle_seconds=2.0, max_loads=2)
    for name in "abc":
        residency.request(version_of(name), 1)
    first, second = residency.advance(0.0).loads
    assert not residency.advance(0.0).loads
    residency.loaded(first, 0.1)
    (third,) = residency.advance(0.1).loads
    assert [slot.version.name for slot in (first, second, third)] == ["a", "b", "c"]


def test_after_a_restart_used_slots_load_at_once_and_others_on_demand() -> None:
    residency = Residency(max_adapters=3, num_pages=9, cycle_seconds=2.0)
    used, idle = resident(residency, "a", 0.0), resident(residency, "b", 0.0)
    residency.release(idle)
    assert residency.restarted() == [used]
    residency.loaded(used, 1.0)
    assert not residency.advance(1.0).loads
    assert residency.request(idle.version, 1) is None
    assert residency.advance(1.0).loads == [idle]


def test_the_expected_wait_grows_with_loads_and_turns() -> None:
    residency = Residency(max_adapters=1, num_pages=9, cycle_seconds=2.0)
    version = version_of("a")
    assert residency.expected_seconds(version, 0.0, 0.5) == pytest.approx(0.5)
    resident(residency, "a", 0.0)
    assert residency.expected_seconds(version, 0.0, 0.5) == 0.0
    busy = residency.expected_seconds(version_of("b"), 1.0, 0.5)
    assert busy == pytest.approx(1.0 + 2.0 + 0.5)
    residency.request(version_of("b"), 1)
    assert residency.expected_seconds(version_of("c"), 1.0, 0.5) > busy + 2.0
