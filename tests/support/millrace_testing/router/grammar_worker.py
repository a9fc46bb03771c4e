"""The process that large grammars are read in, from outside, and a format of tool calls that says where it was used."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from millrace_router.errors import ToolError, ValidationError
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.llama import JsonCalls
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_format import ToolParser


def grammar_workers() -> list[psutil.Process]:
    """Those that this process has started and that have not ended."""
    return [child for child in psutil.Process().children() if _is_grammar_worker(child)]


def _is_grammar_worker(child: psutil.Process) -> bool:
    try:
        return "millrace_router.validation.grammar_worker" in child.cmdline()
    except psutil.NoSuchProcess:
        # Ended, and perhaps left as a zombie by a test of something else.
        return False


def refuse(error: type[ValidationError | ToolError]) -> None:
    """Raise it."""
    raise error("no")


@dataclass(frozen=True)
class NotingFormat:
    """Writes down the name of the first tool each time, and gives the process as its grammar.

    At a tool that is called `stop` the process stops.
    """

    notes: Path
    name: str = "noting"
    markers: frozenset[str] = field(default=frozenset())

    def grammar(self, tools: Sequence[Tool], _: ToolChoice) -> Grammar:
        with self.notes.open("a") as file:
            file.write(f"{tools[0].name}\n")
        if tools[0].name == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return Grammar(GrammarKind.LARK, f"{os.getpid()}")

    def parser(self, tools: Sequence[Tool], choice: ToolChoice) -> ToolParser:
        return JsonCalls().parser(tools, choice)

    @property
    def noted(self) -> list[str]:
        """Tools that were asked for, in their order."""
        return self.notes.read_text().split() if self.notes.exists() else []
