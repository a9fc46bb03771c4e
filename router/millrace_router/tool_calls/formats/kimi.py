"""Kimi K2: a name and a number between tokens, and JSON arguments."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame, NamedCall, NamedFormat
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.lark import literal

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


class KimiK2(NamedFormat):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section.

    The number counts the calls of a conversation. Clients get other ids, and templates get the model's.
    """

    name: ClassVar[str] = "kimi_k2"
    block: ClassVar[Block] = Block(
        openers=(_SECTION,), kept=(_BEGIN,), closers=(_SECTION_END,), several=True
    )
    frame: ClassVar[Frame] = Frame(before=(_SECTION,), behind=(_SECTION_END,), shared=True)
    tokens: ClassVar[tuple[str, ...]] = (_SECTION, _BEGIN, _ARGUMENTS, _END, _SECTION_END)
    named: ClassVar[NamedCall] = NamedCall(
        before=(_BEGIN,), between=_ARGUMENTS, behind=(_END,), optional="functions."
    )

    def _call(self, name: str, arguments: str) -> str:
        begin, behind_id, end = map(self._marker, (_BEGIN, _ARGUMENTS, _END))
        id_ = f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/"
        return f"{begin} {id_} {behind_id} {arguments} {end}"
