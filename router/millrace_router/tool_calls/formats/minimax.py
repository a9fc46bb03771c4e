"""MiniMax: a JSON object on each line in M1, parameters in tags in M2."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.call_format import Listed
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.parsing.xml_format import XmlFormat, XmlSyntax


class MiniMaxM1(Listed):
    """`<tool_calls>`, a line with `{"name": …, "arguments": …}` for each call, `</tool_calls>`."""

    name: ClassVar[str] = "minimax"
    opener: ClassVar[str] = "<tool_calls>"
    behind: ClassVar[str] = "</tool_calls>"
    between: ClassVar[str] = "\n"
    edges: ClassVar[tuple[str, str]] = ("\n", "\n")
    syntax: ClassVar[Syntax] = Syntax(
        openers=("<tool_calls>",), closers=("</tool_calls>",), separators=",", lists=True
    )
    tokens: ClassVar[tuple[str, ...]] = ("<tool_calls>", "</tool_calls>")


class MiniMaxM2(XmlFormat):
    """`<invoke name="name">`, `<parameter name="key">value</parameter>` for each, `</invoke>`, in a section."""

    name: ClassVar[str] = "minimax_m2"
    block: ClassVar[Block] = Block(
        openers=("<minimax:tool_call>",), closers=("</minimax:tool_call>",), several=True
    )
    frame: ClassVar[Frame] = Frame(
        before=("<minimax:tool_call>", "\n"),
        behind=("\n", "</minimax:tool_call>"),
        between=("\n",),
        shared=True,
    )
    tokens: ClassVar[tuple[str, ...]] = ("<minimax:tool_call>", "</minimax:tool_call>")
    xml = XmlSyntax(
        before_name='<invoke name="',
        behind_name='">',
        before_key='<parameter name="',
        behind_key='">',
        behind_value="</parameter>",
        end="</invoke>",
    )
