"""Models without their own format: bare JSON objects."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.parsing.lark import ANY, BLANKS, literal, matching
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.tool import ToolChoice

_FENCES = ("```json\n", "```\n")


class JsonCalls(CallFormat):
    """`{"name": …, "parameters": …}`, or a list of them, at the start of a line or in a fenced block."""

    name: ClassVar[str] = "json"
    syntax: ClassVar[Syntax] = Syntax(
        openers=_FENCES, closers=("```",), separators=";,", bare=True, lists=True
    )
    arguments_key: ClassVar[str] = "parameters"

    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        if choice.is_single:
            return {"start": "call"}
        return {"start": f"call | {literal('[')} call ({literal(', ')} call)* {literal(']')}"}

    def _free(self, choice: ToolChoice) -> dict[str, str]:
        text = matching(rf"{BLANKS}[^ \t\n\r\{{\[]{ANY}", without=_FENCES)
        return {"start": f"TEXT | {self._forced(choice)['start']}", "TEXT": text}
