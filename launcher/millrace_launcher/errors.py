"""Failures of a launch. All but the last have the names of TGI's errors, which logs in JSON tell."""

from __future__ import annotations

from typing import ClassVar


class LaunchError(Exception):
    """Ends the launcher with `exit_code`; `str(error)` is a sentence for the operator."""

    exit_code: ClassVar[int] = 1
    sentence: ClassVar[str] = "the server could not be started"
    """The message for a failure whose only known cause is in the log."""

    def __str__(self) -> str:
        return "".join(map(str, self.args)) or self.sentence

    @property
    def variant(self) -> str:
        return type(self).__name__


class ArgumentValidation(LaunchError):  # noqa: N818
    """Flags contradict each other or cannot be met."""


class NotEnoughCUDADevices(LaunchError):  # noqa: N818
    """There are fewer GPUs than shards."""


class DownloadError(LaunchError):
    """The model could not be resolved to a local folder."""

    sentence = "the model could not be found or downloaded; the log above says more"


class ShardCannotStart(LaunchError):  # noqa: N818
    """A shard reported why it cannot start."""

    sentence = "a shard could not be started; the log above says more"


class WebserverCannotStart(LaunchError):  # noqa: N818
    """The router reported why it cannot start, or never became ready."""

    sentence = "the router could not be started; the log above says more"


class WebserverFailed(LaunchError):  # noqa: N818
    """The router died repeatedly."""

    sentence = "the router died again and again; the log above says more"


class ShardCrashLoop(LaunchError):  # noqa: N818
    """The shards died repeatedly without a step in between."""

    exit_code = 3

    def __init__(self, reason: str) -> None:
        super().__init__(f"giving up on the shards: {reason}")
        self.reason = reason
