"""`python -m bench.scale COMMAND`: many replicas, real and simulated."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence

from bench.scale import compare, simulate, validate, windows

COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "validate": validate.main,
    "compare": compare.main,
    "simulate": simulate.main,
    "windows": windows.main,
}


def main() -> int:
    """Run a command with the rest of the line; return its exit code."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if asked in COMMANDS:
        return COMMANDS[asked](sys.argv[2:])
    print(f"usage: python -m bench.scale {{{','.join(COMMANDS)}}} ...")
    if asked not in ("-h", "--help"):
        return 2
    for command in COMMANDS.values():
        with contextlib.suppress(SystemExit):
            command(["--help"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
