"""Formats of a name between tokens and JSON arguments: DeepSeek V3 and V3.1, Kimi K2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace_router.tool_calls.blocks.block_format import BlockFormat, Frame
from millrace_router.tool_calls.blocks.block_parser import Block, CallSink
from millrace_router.tool_calls.blocks.cursor import Cursor, Wait
from millrace_router.tool_calls.lark import literal
from millrace_router.tool_calls.tool import Tool
from millrace_router.tool_calls.tool_prompt import prompt_for

_MAX_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReader:
    """Reads `before`, a name, perhaps `:` and a number, `between`, arguments and `behind`; blanks may be added."""

    names: Sequence[str]
    before: tuple[str, ...]
    between: str
    behind: tuple[str, ...]
    optional: str = ""
    """A text that may precede the name."""

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
        """See `CallReader`."""
        name = yield from self._header(cursor)
        if not name or (yield from cursor.peek()) != "{":
            return False
        sink.start(name)
        if not (yield from cursor.json(sink.give)):
            return False
        for text in self.behind:
            yield from cursor.skip()
            yield from cursor.take([text])
        return True

    def _header(self, cursor: Cursor) -> Wait[str]:
        """Read up to the arguments; return the name, "" if there is none."""
        for text in self.before:
            if not (yield from cursor.take([text])):
                return ""
            yield from cursor.skip()
        if self.optional:
            yield from cursor.take([self.optional])
        name = yield from cursor.take(self.names)
        if (yield from cursor.take([":"])):
            yield from cursor.skip("0123456789", _MAX_DIGITS)
        yield from cursor.skip()
        if not (yield from cursor.take([self.between])):
            return ""
        yield from cursor.skip()
        return name


_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"


class DeepSeekV31(BlockFormat):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` for each call, in a section of its own."""

    name: ClassVar[str] = "deepseek_v31"
    tool_prompt: ClassVar[str] = prompt_for(
        f"{_CALLS}{_CALL}function name{_SEPARATOR}arguments{_CALL_END}{_CALLS_END}"
    )
    block: ClassVar[Block] = Block(
        openers=(_CALLS,), kept=(_CALL,), closers=(_CALLS_END,), several=True
    )
    frame: ClassVar[Frame] = Frame(before=(_CALLS,), behind=(_CALLS_END,), shared=True)
    tokens: ClassVar[tuple[str, ...]] = (_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END)

    def reader(self, tools: Sequence[Tool]) -> NamedReader:
        """See the base."""
        return NamedReader(
            names=[tool.name for tool in tools],
            before=(_CALL,),
            between=_SEPARATOR,
            behind=(_CALL_END,),
        )

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

    def reader(self, tools: Sequence[Tool]) -> NamedReader:
        """See the base."""
        return NamedReader(
            names=[tool.name for tool in tools],
            before=(_CALL, "function", _SEPARATOR),
            between="```json",
            behind=("```", _CALL_END),
        )

    def _call(self, name: str, arguments: str) -> str:
        call, separator, end = map(self._marker, (_CALL, _SEPARATOR, _CALL_END))
        before = f"{call} {literal('function')} {separator} {literal(f'{name}{_FENCE}')}"
        return f"{before} {arguments} {literal(_FENCE_END)} {end}"


_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


class KimiK2(BlockFormat):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section.

    The number counts the calls of a conversation. Clients get other ids, and templates get those of the model.
    """

    name: ClassVar[str] = "kimi_k2"
    block: ClassVar[Block] = Block(
        openers=(_SECTION,), kept=(_BEGIN,), closers=(_SECTION_END,), several=True
    )
    frame: ClassVar[Frame] = Frame(before=(_SECTION,), behind=(_SECTION_END,), shared=True)
    tokens: ClassVar[tuple[str, ...]] = (_SECTION, _BEGIN, _ARGUMENTS, _END, _SECTION_END)

    def reader(self, tools: Sequence[Tool]) -> NamedReader:
        """See the base."""
        return NamedReader(
            names=[tool.name for tool in tools],
            before=(_BEGIN,),
            between=_ARGUMENTS,
            behind=(_END,),
            optional="functions.",
        )

    def _call(self, name: str, arguments: str) -> str:
        begin, behind_id, end = map(self._marker, (_BEGIN, _ARGUMENTS, _END))
        id_ = f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/"
        return f"{begin} {id_} {behind_id} {arguments} {end}"
