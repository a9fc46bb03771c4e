"""A request as a workload describes it: when it comes and how long it is, but no text."""

from __future__ import annotations

from typing import NamedTuple


class Arrival(NamedTuple):
    """One request of a workload."""

    arrived_at: float
    """Seconds on the virtual clock."""
    prompt_tokens: int
    output_tokens: int
    """Tokens after which the model would end by itself."""
    max_new_tokens: int | None = None
    """What the client asks for at most; None leaves it to the server."""
    group: str = ""
    """Requests of one group begin with the same tokens."""
    prefix_tokens: int = 0
    """How many of its first tokens, prompt and answer, are those of its group."""
    priority: int = 0
    tenant: str = ""
    max_queue_seconds: float | None = None
