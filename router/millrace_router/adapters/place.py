"""An adapter's place in the shards' memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from millrace_router.request.adapter import AdapterVersion


class PlaceState(Enum):
    """The state of a slot on the shards."""

    LOADING = auto()
    """They are loading the adapter."""
    RESIDENT = auto()
    """All ranks have loaded it."""
    STALE = auto()
    """They had it before the last failure; nobody knows whether they have it now."""
    LEAVING = auto()
    """They are removing it."""


@dataclass(slots=True, eq=False)
class Place:
    """A slot and its pages, with the version that they are for. Times are in seconds."""

    version: AdapterVersion
    slot: int
    num_pages: int
    state: PlaceState = PlaceState.LOADING
    num_users: int = 0
    """Requests that are queued or admitted with it, and sequences of the shards that name it."""
    resident_since: float = 0.0
    closed_at: float | None = None
    """When it was closed to new requests; None while it is open."""
    is_expelled: bool = False
    """Whether its requests are taken out of the batch, so that it becomes idle."""
    num_slices: int = field(init=False)
    """Slices of 16 ranks of all its layers."""

    def __post_init__(self) -> None:
        self.num_slices = sum(count for _, count in self.version.num_slices)

    @property
    def digest(self) -> str:
        """The digest of its version."""
        return self.version.digest

    @property
    def is_open(self) -> bool:
        """Whether a new request may use it at once."""
        return self.state is PlaceState.RESIDENT and self.closed_at is None

    @property
    def is_idle(self) -> bool:
        """Whether it may be evicted."""
        return not self.num_users and self.state in (PlaceState.RESIDENT, PlaceState.STALE)


@dataclass(slots=True, eq=False)
class Demand:
    """A version that has no open place, and the requests that wait for one."""

    version: AdapterVersion
    num_pages: int
    asked_at: float
    """When the first of the requests came."""
    num_requests: int = 0
