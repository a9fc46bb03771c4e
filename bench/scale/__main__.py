"""`python -m bench.scale COMMAND`: many replicas. Each command has its own `--help`."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {"ingress": "bench.scale.ingress"}
"""Command and the module whose `main` takes its arguments."""


def main() -> int:
    """Run one command."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.stderr.write(f"usage: python -m bench.scale {{{','.join(COMMANDS)}}} …\n")
        return 2
    status: int = import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:])
    return status


if __name__ == "__main__":
    sys.exit(main())
