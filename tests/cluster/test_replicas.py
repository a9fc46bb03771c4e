"""The directory's list of replicas: slots that stay, and leases that end."""

from __future__ import annotations

import pytest

from millrace_ray.serving.errors import ServingError
from millrace_ray.serving.haproxy import LEASE_TICKS, SLOTS, Replicas, State


def test_a_replica_keeps_its_slot_when_the_list_is_made_anew() -> None:
    before = Replicas()
    assert before.hold("a", "h", 1, slot=None)
    assert before.hold("b", "h", 2, slot=None)
    assert not before.hold("b", "h", 2, slot=None)
    after = Replicas()
    after.hold("b", "h", 2, slot=before.slot_of("b"))
    after.hold("a", "h", 1, slot=before.slot_of("a"))
    after.hold("c", "h", 3, slot=before.slot_of("a"))
    assert [after.slot_of(name) for name in "abc"] == [1, 2, 3]


def test_a_lease_ends_unless_it_is_renewed() -> None:
    replicas = Replicas()
    replicas.hold("a", "h", 1, slot=None)
    replicas.hold("b", "h", 2, slot=None)
    for _ in range(LEASE_TICKS + 1):
        replicas.hold("b", "h", 2, slot=1)
        replicas.tick()
    assert [server.port for server in replicas.servers] == [2]
    replicas.hold("c", "h", 3, slot=None)
    assert replicas.slot_of("c") == 1


def test_a_draining_replica_stays_listed_until_it_has_ended() -> None:
    replicas = Replicas()
    replicas.hold("a", "h", 1, slot=None)
    replicas.drain("a")
    replicas.hold("a", "h", 1, slot=None)
    assert [server.state for server in replicas.servers] == [State.DRAIN]
    replicas.remove("a")
    replicas.remove("a")
    replicas.drain("a")
    assert len(replicas) == 0


def test_a_full_list_of_replicas_is_an_error() -> None:
    replicas = Replicas()
    for number in range(SLOTS):
        replicas.hold(str(number), "h", number, slot=None)
    with pytest.raises(ServingError, match=f"room for {SLOTS} replicas"):
        replicas.hold("more", "h", 1, slot=None)
