"""The argument parser of the commands, and the words after a lone `--`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are two lines and exit code 2."""

    def __init__(self, program: str, *, usage: str, description: str) -> None:
        super().__init__(
            prog=program,
            usage=f"{program} {usage}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """End with the message on stderr."""
        sys.stderr.write(f"error: {message}\n\nFor more information, try '{self.prog} --help'.\n")
        raise SystemExit(2)

    def add_api_key(self) -> None:
        """Add the flag of the server's key."""
        self.add_argument(
            "--api-key",
            metavar="KEY",
            default=os.environ.get("API_KEY"),
            help="of the server [env: API_KEY]",
        )


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before a lone `--`, and the launcher's flags after it."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:cut]), list(argv[cut + 1 :])


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
