"""Seed-OSS: parameters in tags."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from millrace_router.tool_calls.formats.qwen_coder import Qwen3Coder
from millrace_router.tool_calls.parsing.block_format import Frame
from millrace_router.tool_calls.parsing.block_parser import Block

_FUNCTION = "<function="


class SeedOss(Qwen3Coder):
    """As Qwen3-Coder, with another outer tag."""

    name: ClassVar[str] = "seed_oss"
    block: ClassVar[Block] = Block(
        openers=("<seed:tool_call>",), kept=(_FUNCTION,), closers=("</seed:tool_call>",)
    )
    frame: ClassVar[Frame] = Frame(
        before=("<seed:tool_call>", "\n"), behind=("\n", "</seed:tool_call>"), between=("\n",)
    )
    tokens: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")
    xml = replace(Qwen3Coder.xml, padding="", closer="</seed:tool_call>")
