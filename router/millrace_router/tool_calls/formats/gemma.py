"""Gemma 4 and FunctionGemma: a name and an object whose strings are between tokens."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.expression_format import ExpressionFormat
from millrace_router.tool_calls.parsing.expression_reader import (
    ExpressionSyntax,
)


class Gemma4(ExpressionFormat):
    """`<|tool_call>call:name{key:value,…}<tool_call|>` for each call; strings are between `<|"|>`."""

    name: ClassVar[str] = "gemma4"
    expression: ClassVar[ExpressionSyntax] = ExpressionSyntax(
        before_name="call:", edges=("{", "}"), assign=":", comma=",", colon=":", quote='<|"|>'
    )
    block: ClassVar[Block] = Block(openers=("<|tool_call>",), closers=("<tool_call|>",))
    frame: ClassVar[Frame] = Frame(before=("<|tool_call>",), behind=("<tool_call|>",))
    tokens: ClassVar[tuple[str, ...]] = ("<|tool_call>", "<tool_call|>", '<|"|>')


class FunctionGemma(Gemma4):
    """As Gemma 4, with other tokens."""

    name: ClassVar[str] = "functiongemma"
    expression: ClassVar[ExpressionSyntax] = ExpressionSyntax(
        before_name="call:", edges=("{", "}"), assign=":", comma=",", colon=":", quote="<escape>"
    )
    block: ClassVar[Block] = Block(
        openers=("<start_function_call>",), closers=("<end_function_call>",)
    )
    frame: ClassVar[Frame] = Frame(
        before=("<start_function_call>",), behind=("<end_function_call>",)
    )
    tokens: ClassVar[tuple[str, ...]] = (
        "<start_function_call>",
        "<end_function_call>",
        "<escape>",
    )
