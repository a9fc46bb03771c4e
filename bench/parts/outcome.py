"""When a request was answered."""

from __future__ import annotations

from dataclasses import dataclass

from bench.parts.client import Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that was answered."""

    request: Request
    seconds: float
    """From its due time to its last token."""

    @property
    def ended(self) -> float:
        """The time of the last token, in seconds after the start of the load."""
        return self.request.due + self.seconds
