"""Common parts of the command lines: options, the command as it was typed, progress."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.paths import OUT


def run_parser(
    name: str, description: str | None, *, patience: float = 60.0
) -> argparse.ArgumentParser:
    """A parser for `python -m bench.NAME` with the options of every run."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module(name)}",
        description=description,
    )
    parser.add_argument(
        "--patience", type=float, default=patience, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder of logs and charts")
    parser.add_argument(
        "--record", action="store_true", help="write the figures to bench/results, as JSON"
    )
    return parser


def module(name: str) -> str:
    """The Python module of a benchmark; the empty name is `bench` itself."""
    return f"bench.{name}".rstrip(".")


def command(name: str, arguments: Sequence[str] | None = None) -> str:
    """The command of this run, as one types it; by default with the process's arguments."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", "-m", module(name), *given])


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)
