"""Phi-4-mini: a JSON list behind a marker."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.call_format import Listed
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.tool_prompt import prompt_for


class Phi4Mini(Listed):
    """`functools[{"name": …, "arguments": …}]`, or the same list in the tokens of the model's card."""

    name: ClassVar[str] = "phi4_mini_json"
    tool_prompt: ClassVar[str] = prompt_for(
        'functools[{"name": function name, "arguments": arguments}]'
    )
    opener: ClassVar[str] = "functools"
    syntax: ClassVar[Syntax] = Syntax(
        openers=("functools", "<|tool_call|>"), closers=("<|/tool_call|>",), lists=True
    )
    tokens: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<|/tool_call|>")
