"""The command `millrace-shard`: serve, download or convert a model, or run it with `transformers`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "serve": ("serve", "serve a rank of a model to a router"),
    "download-weights": ("download_weights", "bring the files of a model to the cache"),
    "convert": ("convert", "write pickles of PyTorch as safetensors"),
    "reference": ("reference", "answer prompts with plain `transformers`, to compare"),
    "fork-server": ("fork_server", "load a model once and fork its shards, for the launcher"),
    "gpus": ("device_settings", "print which GPUs shards can use, as JSON"),
}
"""By name, the module and one line of help."""
USAGE = "usage: millrace-shard COMMAND [ARGUMENT ...]\n\ncommands:\n" + "".join(
    f"  {name:16} {text}\n" for name, (_, text) in COMMANDS.items()
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Only its module is loaded, since some commands do not need torch."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        wants_help = bool(arguments) and arguments[0] in ("-h", "--help")
        (sys.stdout if wants_help else sys.stderr).write(USAGE)
        return 0 if wants_help else 2
    module = f"millrace_shard.commands.{COMMANDS[arguments[0]][0]}"
    status: int = importlib.import_module(module).main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
