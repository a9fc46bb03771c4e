"""The errors that a program which uses `millrace` may catch."""

from __future__ import annotations

import errno


class MillraceError(Exception):
    """The base of all errors of this package."""


class StartError(MillraceError):
    """The model could not be loaded or its server not started; the message says why."""

    def __init__(self, reason: str, log: str = "") -> None:
        """`log` is the end of the server's log, if it has one."""
        super().__init__(reason)
        self.log = log


class ConnectionFailed(MillraceError):  # noqa: N818
    """The server cannot be reached, or the connection broke."""


class OutputError(MillraceError):
    """The file for the answers of a batch has something else."""


class RequestError(MillraceError):
    """The server refused or failed a request."""

    def __init__(
        self, status: int, kind: str, message: str, *, retry_after_seconds: float | None = None
    ) -> None:
        """`kind` is the server's word for the error, such as `validation`."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds
        """When to ask again, where a stream was refused and the server says so."""


def no_server(base: str, error: OSError) -> str:
    """The sentence for an address where nothing listens."""
    reason = error.strerror if error.errno in errno.errorcode else None
    if error.errno == errno.ECONNREFUSED or reason is None:
        reason = "nothing listens there"
    return f"no server at {base}: {reason}; `millrace serve` starts one"
