"""How long is waited for shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """In seconds."""

    step_seconds: float = 30.0
    """What every step gets, and an idle shard that is asked whether it is there."""
    recovery_seconds: float = 300.0
    """What shards get to come back before those who wait are told that it is in vain."""


DEFAULT_PATIENCE = Patience()
