"""The terminal: reads the user's lines, writes answers to stdout, and all else to stderr."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

PROMPT = "> "
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Screen:
    """Standard input and output. Without a terminal as input there is no prompt, and stdout has answers alone."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._has_colours = sys.stdout.isatty()
        if self.is_interactive:
            # Its import gives `input` a history and keys to edit; not every Python has it.
            with suppress(ImportError):
                importlib.import_module("readline")

    def read(self) -> str:
        """The user's next line. Raises EOFError at the end, KeyboardInterrupt for Ctrl-C."""
        if self.is_interactive:
            return input(PROMPT)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, text: str, *, is_thought: bool = False) -> None:
        """Write a piece of an answer; a thought is dim, and only shown on a terminal."""
        if is_thought:
            if not self._has_colours:
                return
            text = f"{DIM}{text}{PLAIN}"
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a line that is no answer."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
