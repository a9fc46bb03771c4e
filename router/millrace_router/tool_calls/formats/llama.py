"""Llama: bare JSON objects in 3.1, 3.2 and 3.3, Python's expressions in 4."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.parsing.expression_format import ExpressionFormat
from millrace_router.tool_calls.parsing.expression_reader import PYTHON, ExpressionSyntax
from millrace_router.tool_calls.parsing.lark import ANY, BLANKS, literal, matching
from millrace_router.tool_calls.parsing.syntax import Syntax
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


class Pythonic(ExpressionFormat):
    """`[name(key=value), …]` as the whole answer, or between Llama 4's tokens; values are Python's literals."""

    name: ClassVar[str] = "pythonic"
    expression: ClassVar[ExpressionSyntax] = PYTHON
    block: ClassVar[Block] = Block(
        openers=("<|python_start|>",),
        bare="[",
        closers=("]", "]<|python_end|>", "<|python_end|>"),
        several=True,
        separators=",",
    )
    frame: ClassVar[Frame] = Frame(before=("[",), behind=("]",), between=(", ",), shared=True)
    tokens: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    def _free(self, choice: ToolChoice) -> dict[str, str]:
        text = matching(rf"{BLANKS}[^ \t\n\r\[]{ANY}", without=self.block.openers)
        return {"start": f"TEXT | {self._forced(choice)['start']}", "TEXT": text}
