"""The replicas that a directory knows, each with a slot and a lease that it renews."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_ray.serving.errors import ServingError
from millrace_ray.serving.haproxy import SLOTS, Server, State

LEASE_TICKS = 8
"""A replica that renewed nothing for so many ticks is gone."""


@dataclass(slots=True)
class Lease:
    """A replica's place in the list."""

    server: Server
    ticks_left: int = LEASE_TICKS


class Replicas:
    """Leases by replica. Time is counted in ticks of the owner, so that an owner that was held up ends no lease."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def servers(self) -> list[Server]:
        """All of them."""
        return [lease.server for lease in self._leases.values()]

    def hold(self, replica: str, address: str, port: int, *, slot: int | None) -> bool:
        """Enter a replica, or renew its lease; whether it is new. It gets its former `slot` if that is free."""
        lease = self._leases.get(replica)
        if lease is not None:
            lease.ticks_left = LEASE_TICKS
            return False
        server = Server(self._free_slot(slot), address, port, State.READY)
        self._leases[replica] = Lease(server)
        return True

    def slot_of(self, replica: str) -> int:
        """The slot of a replica that has a lease."""
        return self._leases[replica].server.slot

    def drain(self, replica: str) -> None:
        """No new requests for it."""
        lease = self._leases.get(replica)
        if lease is not None:
            old = lease.server
            lease.server = Server(old.slot, old.address, old.port, State.DRAIN)

    def remove(self, replica: str) -> None:
        """It is gone."""
        self._leases.pop(replica, None)

    def tick(self) -> None:
        """Remove those that did not renew their lease."""
        for replica, lease in list(self._leases.items()):
            lease.ticks_left -= 1
            if lease.ticks_left < 0:
                del self._leases[replica]

    def _free_slot(self, former: int | None) -> int:
        taken = {lease.server.slot for lease in self._leases.values()}
        if former is not None and former not in taken:
            return former
        free = next((slot for slot in range(1, SLOTS + 1) if slot not in taken), None)
        if free is None:
            raise ServingError(f"HAProxy has room for {SLOTS} replicas of an application")
        return free
