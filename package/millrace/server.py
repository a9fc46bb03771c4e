"""A server of a model for the length of a block, for commands that need one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millrace.errors import StartError
from millrace_launcher.verify.servers.deployment import Deployer
from millrace_launcher.verify.servers.deployment import StartError as NotStarted

ERROR = "ERROR"
"""The word of the launcher's log for the level."""


@contextmanager
def serving(model: str | None, flags: Sequence[str]) -> Iterator[str]:
    """Serve a model, or the demo model, on a free port of this machine; the value is the URL.

    `flags` are the launcher's. The server has ended when the block has. Raises StartError.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-") as logs:
        deployer = Deployer(model=model, logs=Path(logs), flags=tuple(flags))
        try:
            with deployer.deployed("server") as deployment:
                yield deployment.client.url
        except NotStarted as error:
            raise StartError(_reason(error)) from error


def _reason(error: NotStarted) -> str:
    """The errors in the server's log, else the end of the log."""
    lines = (line.partition(f" {ERROR} ")[2] for line in error.log.splitlines())
    reasons = [line.partition(": ")[2] for line in lines if line]
    return "; ".join(dict.fromkeys(reasons)) or f"{error}\n{error.log}"
