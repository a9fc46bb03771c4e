"""Failures of a launch. All but the last have the names of TGI's errors, which operators search for on stderr."""

from __future__ import annotations

import json


class LaunchError(Exception):
    """Ends the launcher with `exit_code` and `Error: {variant}` on stderr."""

    exit_code = 1

    def __str__(self) -> str:
        detail = "".join(map(str, self.args))
        variant = type(self).__name__
        return f"{variant}({json.dumps(detail, ensure_ascii=False)})" if detail else variant


class ArgumentValidation(LaunchError):  # noqa: N818
    """Flags contradict each other or cannot be met."""


class NotEnoughCUDADevices(LaunchError):  # noqa: N818
    """There are fewer GPUs than shards."""


class DownloadError(LaunchError):
    """The model could not be resolved to a local folder."""


class ShardCannotStart(LaunchError):  # noqa: N818
    """A shard reported why it cannot start."""


class WebserverCannotStart(LaunchError):  # noqa: N818
    """The router reported why it cannot start, or never became ready."""


class WebserverFailed(LaunchError):  # noqa: N818
    """The router died repeatedly."""


class ShardCrashLoop(LaunchError):  # noqa: N818
    """The shards died repeatedly without a step in between."""

    exit_code = 3

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason
