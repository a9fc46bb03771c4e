"""The errors that a program which uses `millrace` may catch."""

from __future__ import annotations


class MillraceError(Exception):
    """The base of all errors of this package."""


class StartError(MillraceError):
    """The model could not be loaded or its server not started; the message says why."""


class ConnectionFailed(MillraceError):  # noqa: N818
    """The server cannot be reached, or the connection broke."""


class OutputError(MillraceError):
    """The file for the answers of a batch has something else."""


class RequestError(MillraceError):
    """The server refused or failed a request."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        """`kind` is the server's word for the error, such as `validation`."""
        super().__init__(message)
        self.status = status
        self.kind = kind
