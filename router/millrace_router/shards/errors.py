"""Errors of calls to the shards."""

from __future__ import annotations


class ShardError(Exception):
    """A call to the shards failed. When a step fails, all steps in flight fail with it."""


class StepFailed(ShardError):  # noqa: N818
    """The shards are reachable, but a step raised an error or was refused."""

    def __init__(self, message: str, *, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory


class ShardLost(ShardError):  # noqa: N818
    """A shard is unreachable."""


class ShardHung(ShardError):  # noqa: N818
    """A shard is reachable and does not answer."""


class ShardChanged(ShardError):  # noqa: N818
    """Ranks differ from each other, or restarted shards from the first ones, so answers could change."""


class ShardBusy(ShardError):  # noqa: N818
    """The shards have no capacity for the call now; a later call may succeed."""


class ImageRefused(ShardError):  # noqa: N818
    """A shard does not take the pixels of an image."""


class AdapterNotLoaded(ShardError):  # noqa: N818
    """A shard cannot use the file of an adapter."""
