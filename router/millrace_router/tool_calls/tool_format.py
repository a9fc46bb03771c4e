"""How a family of models writes tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace_router.request.request import Grammar
from millrace_router.tool_calls.tool import Parsed, Tool, ToolChoice


class ToolParser(Protocol):
    """Tells calls from text in one answer, as it comes: cut into any pieces, it is parsed the same."""

    def push(self, text: str) -> Parsed:
        """Take more text; what may turn out to begin a call is held back."""

    def finish(self) -> Parsed:
        """Give back what is held: no more text comes."""


class ToolFormat(Protocol):
    """A way to write calls; stateless, one for all requests."""

    @property
    def name(self) -> str:
        """Value of `--tool-call-parser`."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts of special tokens that the parser has to see, though they are hidden from clients.

        No parser gives them back as text.
        """

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice) -> Grammar | None:
        """Return what the whole answer has to match; None if that is any text.

        With `auto` it is a grammar only where a tool is strict, with `required` and `named` always.

        Raises:
            ToolError: no tool has the name that is asked for, or its parameters do not describe an object.
            ValidationError: the parameters are too long, or nested too deeply.

        """

    def parser(self, tools: Sequence[Tool], choice: ToolChoice) -> ToolParser:
        """Return a parser for one answer."""
