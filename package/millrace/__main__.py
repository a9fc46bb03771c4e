"""The command `millrace`: one program whose first word names what it does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace_launcher.settings.foreign_flags import tip_for
from millrace_proto.streams import take_any_text
from millrace_proto.version import VERSION

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the module whose `main` takes its arguments, and one line of help."""

    module: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "serve": Command("millrace.commands.serve", "serve a model over HTTP"),
    "chat": Command("millrace.commands.chat", "chat in the terminal, with a server or a model"),
    "bench": Command("millrace.commands.bench", "measure any OpenAI or TGI server under load"),
    "run-batch": Command("millrace.commands.run_batch", "answer a file of requests"),
    "verify": Command("millrace.verify.__main__", "check that answers do not depend on the batch"),
    "simulate": Command("millrace.simulate.__main__", "size a server with only its scheduler"),
    "download": Command("millrace.commands.download", "bring the files of a model to the cache"),
    "env": Command("millrace.commands.env", "print what a bug report needs"),
}
"""By name. Only the module of the command that runs is imported, since some import much."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 2 where there is no such command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    take_any_text()
    if not arguments:
        sys.stderr.write(usage())
        return 2
    name, *rest = arguments
    if name in ("-h", "--help", "help"):
        sys.stdout.write(usage())
        return 0
    if name in ("-V", "--version"):
        sys.stdout.write(f"millrace {VERSION}\n")
        return 0
    if name not in COMMANDS:
        tip = tip_for(name)
        sys.stderr.write(
            f"error: unknown command {name!r}; the commands are: {', '.join(COMMANDS)}\n"
            + (f"\n  tip: {tip}\n" if tip else "")
        )
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[name].module).main(rest)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def usage() -> str:
    lines = (f"  {name:10} {command.help}" for name, command in COMMANDS.items())
    return "\n".join(
        (
            "usage: millrace COMMAND [ARGUMENT ...]",
            "",
            "commands:",
            *lines,
            "",
            "`millrace COMMAND --help` shows the flags of a command; `millrace --version` the version.",
            "",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
