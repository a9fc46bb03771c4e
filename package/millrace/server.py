"""A server of a model for the length of a block, for commands that need one."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millrace.download import download
from millrace.errors import StartError
from millrace_launcher.errors import LaunchError
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.verify.servers.deployment import Deployer
from millrace_launcher.verify.servers.deployment import StartError as NotStarted

ERROR = "ERROR"
"""The word of the launcher's log for the level."""


@contextmanager
def serving(model: str | None, flags: Sequence[str], *, program: str) -> Iterator[str]:
    """Serve a model, or the demo model, on a free port of this machine; the value is the URL.

    `flags` are the launcher's; SystemExit 2 with a message that names `program` if they are wrong. On a terminal
    stderr tells what happens. The server has ended when the block has. Raises StartError.
    """
    settings = read_settings(
        [*(() if model is None else (f"--model-id={model}",)), *flags], program=program
    )
    sys.stderr.write(f"Starting a server for {model or 'the demo model'}\n")
    if model is not None and sys.stderr.isatty() and not Path(model).exists():
        # The server's log is in a file, and a download may take long.
        try:
            download(settings, model)
        except LaunchError as error:
            raise StartError(str(error)) from error
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
