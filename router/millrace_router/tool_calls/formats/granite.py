"""Granite 3: a JSON list behind a marker."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.call_format import Listed
from millrace_router.tool_calls.parsing.syntax import Syntax


class Granite(Listed):
    """`<|tool_call|>[{"name": …, "arguments": …}]`; a 20B model writes `<function_call>` and an object."""

    name: ClassVar[str] = "granite"
    opener: ClassVar[str] = "<|tool_call|>"
    syntax: ClassVar[Syntax] = Syntax(
        openers=("<|tool_call|>", "<tool_call>", "<function_call>"), separators=",", lists=True
    )
    tokens: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "<function_call>")
