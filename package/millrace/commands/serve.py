"""`millrace serve [MODEL] [FLAG ...]`: the launcher, with the model as the first word."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_launcher.__main__ import main as launch

PROGRAM = "millrace serve"


def main(argv: Sequence[str]) -> int:
    """Serve until a signal, with `millrace-launcher`'s exit codes."""
    return launch(launcher_arguments(argv), program=PROGRAM)


def launcher_arguments(argv: Sequence[str]) -> list[str]:
    """The launcher's arguments: a first word that is no flag names the model."""
    if argv and not argv[0].startswith("-"):
        return [f"--model-id={argv[0]}", *argv[1:]]
    return list(argv)
