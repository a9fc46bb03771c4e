"""The command line that benchmarks made of parts have in common."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path


def parts_parser(
    prog: str,
    description: str | None,
    parts: Collection[str],
    *,
    default: Sequence[str] | None = None,
) -> argparse.ArgumentParser:
    """A parser that knows which `parts` to run, for how long to wait, and where results go; all of them by default."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(parts)):
            raise argparse.ArgumentTypeError(
                f"no part {', '.join(unknown)}; there are {list(parts)}"
            )
        return names

    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "--only", type=chosen, default=list(default or parts), help="parts, with commas"
    )
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--flags", type=shlex.split, default=[], help="more, for every launcher")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--record", action="store_true", help="write sections of bench/RESULTS.md")
    return parser
