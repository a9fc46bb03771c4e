"""Whether the shards serve, and if they do not, since when and why. What health is judged by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ShardStatus:
    """Written by the batcher, read by health checks; times are of `time.monotonic`."""

    since: float | None = None
    """When the shards stopped serving; None while they serve."""
    reason: str = ""
    """Why they stopped, in words for an operator."""
    has_given_up: bool = False
    """Whether nobody restarts them any more."""

    def begin(self, reason: str, now: float) -> None:
        """The shards do not serve; a failure during a recovery does not begin another."""
        self.reason = reason
        if self.since is None:
            self.since = now

    def end(self, now: float) -> float | None:
        """They serve again; how many seconds they did not, None if they always did."""
        since, self.since, self.reason = self.since, None, ""
        return None if since is None else now - since

    def give_up(self, reason: str, now: float) -> None:
        """They will not come back."""
        self.begin(reason, now)
        self.has_given_up = True

    def is_overdue(self, now: float, grace_seconds: float) -> bool:
        """Whether to tell those who wait that it is in vain."""
        return self.has_given_up or (self.since is not None and now - self.since > grace_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """In seconds."""

    step_seconds: float = 30.0
    """What every step gets, and an idle shard that is asked whether it is there."""
    recovery_seconds: float = 300.0
    """What shards get to come back before those who wait are told that it is in vain."""


DEFAULT_TIMEOUTS = Timeouts()
