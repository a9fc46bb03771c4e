"""DeepSeek V3 and V3.1: a name between tokens, and JSON arguments."""

from __future__ import annotations

from typing import ClassVar

from millrace_router.tool_calls.parsing.block_format import Frame, NamedCall, NamedFormat
from millrace_router.tool_calls.parsing.block_parser import Block
from millrace_router.tool_calls.parsing.lark import literal
from millrace_router.tool_calls.tool_prompt import prompt_for

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"


class DeepSeekV31(NamedFormat):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` for each call, all in one section."""

    name: ClassVar[str] = "deepseek_v31"
    tool_prompt: ClassVar[str] = prompt_for(
        f"{_CALLS}{_CALL}function name{_SEPARATOR}arguments{_CALL_END}{_CALLS_END}"
    )
    block: ClassVar[Block] = Block(
        openers=(_CALLS,), kept=(_CALL,), closers=(_CALLS_END,), several=True
    )
    frame: ClassVar[Frame] = Frame(before=(_CALLS,), behind=(_CALLS_END,), shared=True)
    tokens: ClassVar[tuple[str, ...]] = (_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)
    named: ClassVar[NamedCall] = NamedCall(before=(_CALL,), between=_SEPARATOR, behind=(_CALL_END,))

    def _call(self, name: str, arguments: str) -> str:
        marks = map(self._marker, (_CALL, _SEPARATOR, _CALL_END))
        return "{} {name} {} {arguments} {}".format(*marks, name=literal(name), arguments=arguments)


class DeepSeekV3(DeepSeekV31):
    """As V3.1, but a call is `function<｜tool▁sep｜>name`, a newline and the arguments in a fenced block."""

    name: ClassVar[str] = "deepseek_v3"
    tool_prompt: ClassVar[str] = prompt_for(
        f"{_CALLS}{_CALL}function{_SEPARATOR}function name{_FENCE}arguments{_FENCE_END}{_CALL_END}{_CALLS_END}"
    )
    frame: ClassVar[Frame] = Frame(
        before=(_CALLS,), behind=(_CALLS_END,), between=("\n",), shared=True
    )
    named: ClassVar[NamedCall] = NamedCall(
        before=(_CALL, "function", _SEPARATOR), between="```json", behind=("```", _CALL_END)
    )

    def _call(self, name: str, arguments: str) -> str:
        call, separator, end = map(self._marker, (_CALL, _SEPARATOR, _CALL_END))
        before = f"{call} {literal('function')} {separator} {literal(f'{name}{_FENCE}')}"
        return f"{before} {arguments} {literal(_FENCE_END)} {end}"
