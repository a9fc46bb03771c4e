"""LFM2: a list of Python's expressions between tokens."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.expression_format import ExpressionFormat
from millrace_router.tool_calls.parsing.expression_reader import (
    PYTHON,
    ExpressionSyntax,
)


class Lfm2(ExpressionFormat):
    """`<|tool_call_start|>[name(key=value), …]<|tool_call_end|>`."""

    name: ClassVar[str] = "lfm2"
    expression: ClassVar[ExpressionSyntax] = PYTHON
    block: ClassVar[Block] = Block(
        openers=("<|tool_call_start|>",),
        closers=("]<|tool_call_end|>", "<|tool_call_end|>", "]"),
        several=True,
        separators=",",
    )
    frame: ClassVar[Frame] = Frame(
        before=("<|tool_call_start|>", "["),
        behind=("]", "<|tool_call_end|>"),
        between=(", ",),
        shared=True,
    )
    tokens: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>", "<|tool_call_end|>")
