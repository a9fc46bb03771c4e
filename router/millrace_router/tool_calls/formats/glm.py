"""GLM 4.5 and later: keys and values in tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.call_format import NO_IDS
from millrace_router.tool_calls.parsing.xml_format import XmlFormat, XmlSyntax


class Glm(XmlFormat):
    """`<tool_call>name`, `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each, `</tool_call>`.

    Each is on its own line; GLM 4.7 and later write them without newlines.
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
