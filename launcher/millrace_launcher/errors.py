"""How a launch can fail; each is one of TGI's variants, which operators grep for on stderr."""

from __future__ import annotations

import json


class LaunchError(Exception):
    """Ends the launcher with exit code 1 and `Error: {variant}` on stderr."""

    def __str__(self) -> str:
        detail = "".join(map(str, self.args))
        variant = type(self).__name__
        return f"{variant}({json.dumps(detail, ensure_ascii=False)})" if detail else variant


class ArgumentValidation(LaunchError):  # noqa: N818
    """Flags that contradict each other or ask for what does not exist."""


class NotEnoughCUDADevices(LaunchError):  # noqa: N818
    """Fewer GPUs than shards."""


class DownloadError(LaunchError):
    """The model could not be resolved to a local folder."""


class ShardCannotStart(LaunchError):  # noqa: N818
    """A shard died before it was ready."""


class ShardFailed(LaunchError):  # noqa: N818
    """A shard died later."""


class WebserverCannotStart(LaunchError):  # noqa: N818
    """The router died before it was ready."""


class WebserverFailed(LaunchError):  # noqa: N818
    """The router died later."""
