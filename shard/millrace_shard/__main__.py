"""The command `millrace-shard`: serve, download or convert a model, or run it with `transformers`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": "millrace_shard.commands.serve",
    "download-weights": "millrace_shard.commands.download_weights",
    "convert": "millrace_shard.commands.convert",
    "reference": "millrace_shard.commands.reference",
    "fork-server": "millrace_shard.commands.fork_server",
    "gpus": "millrace_shard.commands.device_settings",
}
USAGE = f"usage: millrace-shard {{{','.join(COMMANDS)}}} ...\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Only its module is loaded, since some commands do not need torch."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        wants_help = bool(arguments) and arguments[0] in ("-h", "--help")
        (sys.stdout if wants_help else sys.stderr).write(USAGE)
        return 0 if wants_help else 2
    status: int = importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
