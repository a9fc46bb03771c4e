"""Tool calls of Llama 3.1, 3.2 and 3.3, and of models without a format of their own: bare JSON objects."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.call_format import CallFormat
from millrace_router.tool_calls.lark import ANY, BLANKS, literal, matching
from millrace_router.tool_calls.syntax import Syntax
from millrace_router.tool_calls.tool import ToolChoice

_OPENER = "<|python_tag|>"


class Llama(CallFormat):
    """`{"name": …, "parameters": …}` at the start of a line or after a tag; `;` separates several."""

    name: ClassVar[str] = "llama"
    syntax: ClassVar[Syntax] = Syntax(openers=(_OPENER,), separators=";,", bare=True, lists=True)
    arguments_key: ClassVar[str] = "parameters"
    tokens: ClassVar[tuple[str, ...]] = (_OPENER,)

    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        more = "" if choice.is_single else f" ({literal('; ')} call)*"
        return {"start": f"call{more}"}

    def _free(self, choice: ToolChoice) -> dict[str, str]:
        # The parser would take the tag in text for the token.
        text = matching(rf"{BLANKS}[^ \t\n\r\{{\[]{ANY}", without=[_OPENER])
        return {"start": f"TEXT | {self._forced(choice)['start']}", "TEXT": text}


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
