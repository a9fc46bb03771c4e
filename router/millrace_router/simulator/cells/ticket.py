"""A request on its way through a gateway, and what gateways read of its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from millrace_router.simulator.simulated_request import Arrival

HASHED_TOKENS = 2048
"""A gateway that hashes prompts takes this many tokens of their beginning."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One sending of a request."""

    arrival: Arrival
    """As it is sent now."""
    number: int
    """Of the request in its cell."""
    asked_at: float
    """When it was sent first."""
    gateway: int = 0
    replica: int = 0
    num_uncached: int = 0
    """Prompt tokens that the gateway expects the replica to compute."""
    was_admitted: bool = False
    has_begun: bool = False
    """Whether its client has had a token, of this sending or an earlier one."""


def beginning(arrival: Arrival, number: int, hashed_tokens: int = HASHED_TOKENS) -> bytes:
    """Return the bytes of the request `number` that a gateway hashes: equal for prompts with an equal beginning.

    A group begins alike by its name, however long its prefix is. A request that shares nothing is like no other.
    """
    if arrival.chain:
        last = min(len(arrival.chain), max(1, hashed_tokens // arrival.chain_tokens)) - 1
        return b"/%d" % arrival.chain[last]
    return arrival.group.encode() if arrival.group else b"#%d" % number
