"""The formats of calls that are expressions: pythonic, OLMo 3, LFM2, Gemma 4 and FunctionGemma."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from millrace_router.tool_calls.blocks.block_format import BlockFormat, Frame
from millrace_router.tool_calls.blocks.block_parser import Block
from millrace_router.tool_calls.expressions.expression_grammar import ExpressionGrammar
from millrace_router.tool_calls.expressions.expression_reader import ExpressionReader
from millrace_router.tool_calls.expressions.expression_syntax import (
    JSON_WORDS,
    PYTHON,
    ExpressionSyntax,
)
from millrace_router.tool_calls.lark import ANY, BLANKS, matching
from millrace_router.tool_calls.tool import Tool, ToolChoice


class ExpressionFormat(BlockFormat):
    """A call is an expression."""

    expression: ClassVar[ExpressionSyntax]

    def reader(self, tools: Sequence[Tool]) -> ExpressionReader:
        """See the base."""
        return ExpressionReader(self.expression, tools)

    def _rules_of_call(self, rule: str, tool: Tool) -> dict[str, str]:
        return ExpressionGrammar(self.expression, rule, tool, self._marker).rules()


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
