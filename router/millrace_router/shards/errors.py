"""What can go wrong between the router and its shards."""

from __future__ import annotations


class ShardError(Exception):
    """A call to the shards failed; if it was a step, everything in flight has failed with it."""


class StepFailed(ShardError):  # noqa: N818
    """The shards are there, but a step raised or was refused."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class ShardLost(ShardError):  # noqa: N818
    """A shard is not there, or has gone."""


class ShardHung(ShardError):  # noqa: N818
    """A shard is there, and does nothing."""


class ShardChanged(ShardError):  # noqa: N818
    """Shards differ from each other, or those started anew from what they were: they cannot serve as promised."""


class ShardBusy(ShardError):  # noqa: N818
    """The shards are there, and have no room for what was asked of them; later they may."""
