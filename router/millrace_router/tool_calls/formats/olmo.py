"""OLMo 3: one of Python's expressions on each line."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.expression_format import ExpressionFormat
from millrace_router.tool_calls.parsing.expression_reader import (
    JSON_WORDS,
    PYTHON,
    ExpressionSyntax,
)


class Olmo3(ExpressionFormat):
    """`<function_calls>`, a line with `name(key=value)` for each call, `</function_calls>`; words are JSON's."""

    name: ClassVar[str] = "olmo3"
    expression: ClassVar[ExpressionSyntax] = replace(PYTHON, written=JSON_WORDS)
    block: ClassVar[Block] = Block(
        openers=("<function_calls>",),
        closers=("</function_calls>", "]</function_calls>"),
        several=True,
        separators=",;",
    )
    frame: ClassVar[Frame] = Frame(
        before=("<function_calls>", "\n"),
        behind=("\n", "</function_calls>"),
        between=("\n",),
        shared=True,
    )
    tokens: ClassVar[tuple[str, ...]] = ("<function_calls>", "</function_calls>")
