"""What an adapter, and the process that fetches it, may have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of one fetch."""

    max_rank: int = 64
    max_bytes: int = 2 << 30
    """Of the file of weights."""
    timeout_seconds: float = 300.0
