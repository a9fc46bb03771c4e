"""Qwen3-Coder: parameters in tags."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.xml_format import XmlFormat, XmlSyntax

_FUNCTION = "<function="


class Qwen3Coder(XmlFormat):
    """`<tool_call>`, `<function=name>`, `<parameter=key>⏎value⏎</parameter>` for each, `</function>`, `</tool_call>`.

    Models often leave the outer tag out.
    """

    name: ClassVar[str] = "qwen3_coder"
    block: ClassVar[Block] = Block(
        openers=("<tool_call>",), kept=(_FUNCTION,), closers=("</tool_call>",)
    )
    frame: ClassVar[Frame] = Frame(
        before=("<tool_call>", "\n"), behind=("\n", "</tool_call>"), between=("\n",)
    )
    tokens: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    xml = XmlSyntax(
        before_name=_FUNCTION,
        behind_name=">",
        before_key="<parameter=",
        behind_key=">",
        padding="\n",
        behind_value="</parameter>",
        end="</function>",
        closer="</tool_call>",
    )
