"""The formats of parameters in tags: Qwen3-Coder, Seed-OSS, GLM 4.5 and later, MiniMax M2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from millrace_router.tool_calls.blocks.block_format import BlockFormat, Frame
from millrace_router.tool_calls.blocks.block_parser import Block
from millrace_router.tool_calls.call_format import NO_IDS
from millrace_router.tool_calls.tool import Tool
from millrace_router.tool_calls.xml.xml_grammar import XmlGrammar
from millrace_router.tool_calls.xml.xml_reader import XmlReader
from millrace_router.tool_calls.xml.xml_syntax import XmlSyntax


class XmlFormat(BlockFormat):
    """Each parameter is in tags; the schema tells the types of values."""

    xml: XmlSyntax

    def reader(self, tools: Sequence[Tool]) -> XmlReader:
        """See the base."""
        return XmlReader(self.xml, tools)

    def _rules_of_call(self, rule: str, tool: Tool) -> dict[str, str]:
        return XmlGrammar(self.xml, rule, tool, self._marker).rules()


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
    )


class SeedOss(Qwen3Coder):
    """As Qwen3-Coder, with an outer tag of its own."""

    name: ClassVar[str] = "seed_oss"
    block: ClassVar[Block] = Block(
        openers=("<seed:tool_call>",), kept=(_FUNCTION,), closers=("</seed:tool_call>",)
    )
    frame: ClassVar[Frame] = Frame(
        before=("<seed:tool_call>", "\n"), behind=("\n", "</seed:tool_call>"), between=("\n",)
    )
    tokens: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")
    xml = replace(Qwen3Coder.xml, padding="")


class Glm(XmlFormat):
    """`<tool_call>name`, `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each, `</tool_call>`.

    Each is on a line of its own, but in GLM 4.7 and later, which have no newlines.
    """

    name: ClassVar[str] = "glm45"
    block: ClassVar[Block] = Block(openers=("<tool_call>",), closers=("</tool_call>",))
    frame: ClassVar[Frame] = Frame(
        before=("<tool_call>",), behind=("</tool_call>",), between=("\n",)
    )
    tokens: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    xml = XmlSyntax(
        before_name="",
        behind_name="",
        before_key="<arg_key>",
        behind_key="</arg_key>",
        before_value="<arg_value>",
        behind_value="</arg_value>",
        end="</tool_call>",
        end_is_closer=True,
    )

    def __init__(
        self, special_ids: Mapping[str, int] = NO_IDS, *, has_newlines: bool = True
    ) -> None:
        """Without `has_newlines`, the model writes calls in the later form."""
        super().__init__(special_ids)
        if not has_newlines:
            self.xml = replace(self.xml, spacing="")


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
