"""The base of the formats with calls in blocks: the grammar around calls, and the parser."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from millrace_router.tool_calls.parsing.block_parser import Block, BlockParser, CallReader, CallSink
from millrace_router.tool_calls.parsing.call_format import CallFormat
from millrace_router.tool_calls.parsing.cursor import Cursor, Wait
from millrace_router.tool_calls.parsing.lark import ANY, literal, matching, up_to
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.tool import AnswerParser, Tool, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The texts around calls that a grammar demands; each is a special token where the model has one for it."""

    before: tuple[str, ...]
    """The first is the opener."""
    behind: tuple[str, ...]
    between: tuple[str, ...] = ()
    """Texts between two calls, or between two blocks where each call has a block."""
    shared: bool = False
    """Whether calls share one block."""


class BlockFormat(CallFormat):
    """How a family writes calls that are no JSON objects, with texts around them."""

    syntax: ClassVar[Syntax] = Syntax()
    block: ClassVar[Block]
    frame: ClassVar[Frame]

    @abstractmethod
    def reader(self, tools: Sequence[Tool]) -> CallReader:
        """Return a reader of calls of `tools`."""

    def parser(self, tools: Sequence[Tool], choice: ToolChoice) -> AnswerParser:
        return BlockParser(
            self.block,
            self.reader(tools),
            hidden=self.markers,
            is_single=choice.is_single,
            new_id=self.new_id,
        )

    def _forced(self, choice: ToolChoice) -> dict[str, str]:
        return {"start": self._calls(choice, self._texts(self.frame.before))}

    def _free(self, choice: ToolChoice) -> dict[str, str]:
        first, *rest = self.frame.before
        openers = (*self.block.openers, *self.block.kept)
        text = matching(ANY, without=openers)
        if first in self.markers:
            calls = self._calls(choice, self._texts(self.frame.before))
            return {"start": f"TEXT? ({calls} TEXT?)?", "TEXT": text}
        # The parser would take any of the openers in text for a call.
        opened = up_to(first, without=[one for one in openers if one not in first])
        calls = self._calls(
            choice,
            self._texts(self.frame.before),
            first=f"UP_TO_OPENER {self._texts(rest)}".rstrip(),
        )
        return {"start": f"TEXT | {calls} TEXT?", "UP_TO_OPENER": opened, "TEXT": text}

    def _calls(self, choice: ToolChoice, before: str, first: str | None = None) -> str:
        """Return the rule of all calls; `first` replaces `before` at the first one."""
        first = before if first is None else first
        between, behind = self._texts(self.frame.between), self._texts(self.frame.behind)
        if choice.is_single:
            return f"{first} call {behind}"
        if self.frame.shared:
            return f"{first} call ({between} call)* {behind}"
        return f"{first} call {behind} ({between} {before} call {behind})*"

    def _texts(self, texts: Sequence[str]) -> str:
        return " ".join(
            self._marker(text) if text in self.tokens else literal(text) for text in texts
        )


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
