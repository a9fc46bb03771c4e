"""Cohere's Command: a JSON list between tokens, whose calls have numbers."""

from __future__ import annotations

import json
from typing import ClassVar

from millrace_router.tool_calls.parsing.call_format import Listed
from millrace_router.tool_calls.parsing.lark import literal
from millrace_router.tool_calls.parsing.syntax import Syntax

_ID = '{"tool_call_id": "'


class Cohere(Listed):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": …}]<|END_ACTION|>`."""

    name: ClassVar[str] = "cohere_command3"
    opener: ClassVar[str] = "<|START_ACTION|>"
    behind: ClassVar[str] = "<|END_ACTION|>"
    between: ClassVar[str] = ",\n    "
    edges: ClassVar[tuple[str, str]] = ("[\n    ", "\n]")
    syntax: ClassVar[Syntax] = Syntax(
        openers=("<|START_ACTION|>",), closers=("<|END_ACTION|>",), lists=True
    )
    name_key: ClassVar[str] = "tool_name"
    arguments_key: ClassVar[str] = "parameters"
    tokens: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>", "<|END_ACTION|>")

    def _call(self, name: str, arguments: str) -> str:
        called = json.dumps(name, ensure_ascii=False)
        before = literal(_ID) + r" /[0-9]{1,4}/"
        head = literal(f'", "tool_name": {called}, "parameters": ')
        return f"{before} {head} {arguments} {literal('}')}"
