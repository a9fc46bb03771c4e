"""Nemotron: a JSON list in tags."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.call_format import Listed
from millrace_router.tool_calls.parsing.syntax import Syntax


class Nemotron(Listed):
    """`<TOOLCALL>[{"name": …, "arguments": …}]</TOOLCALL>`."""

    name: ClassVar[str] = "nemotron_json"
    opener: ClassVar[str] = "<TOOLCALL>"
    behind: ClassVar[str] = "</TOOLCALL>"
    syntax: ClassVar[Syntax] = Syntax(openers=("<TOOLCALL>",), closers=("</TOOLCALL>",), lists=True)
    tokens: ClassVar[tuple[str, ...]] = ("<TOOLCALL>", "</TOOLCALL>")
