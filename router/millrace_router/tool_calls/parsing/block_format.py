"""The base of the formats with calls in blocks: the grammar around calls, and the parser."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from millrace_router.request.grammar import check_size
from millrace_router.request.schemas import Schema
from millrace_router.tool_calls.parsing.block_parser import Block, BlockParser, CallReader, CallSink
from millrace_router.tool_calls.parsing.call_format import CallFormat, has_grammar
from millrace_router.tool_calls.parsing.cursor import Cursor, Wait
from millrace_router.tool_calls.parsing.lark import (
    ANY,
    escaped,
    json_value,
    literal,
    matching,
    pattern,
    up_to,
)
from millrace_router.tool_calls.parsing.parameters import (
    Kinds,
    KindsById,
    kinds_of,
    schema_of,
    within,
)
from millrace_router.tool_calls.parsing.syntax import Syntax
from millrace_router.tool_calls.tool import AnswerParser, Tool, ToolChoice

AnySyntax = TypeVar("AnySyntax")


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

    @property
    def openers(self) -> tuple[str, ...]:
        return self.block.openers

    @abstractmethod
    def reader(self, tools: Sequence[Tool], *, has_grammar: bool) -> CallReader:
        """Return a reader of calls of `tools`; with `has_grammar` they are as the model's template has them."""

    def _parser(
        self, tools: Sequence[Tool], choice: ToolChoice, new_id: Callable[[], str]
    ) -> AnswerParser:
        return BlockParser(
            self.block,
            self.reader(tools, has_grammar=has_grammar(tools, choice)),
            hidden=self.markers,
            is_single=choice.is_single,
            new_id=new_id,
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


class CallGrammar(Generic[AnySyntax]):
    """Makes the rules of one call; their names begin with `rule`."""

    def __init__(
        self, syntax: AnySyntax, rule: str, tool: Tool, marker: Callable[[str], str]
    ) -> None:
        """`marker` makes the rule of a text that may be a token. Raises as `arguments_schema` does."""
        self._syntax = syntax
        self._rule = rule
        self._tool = tool
        self._marker = marker
        self._root: Schema = schema_of(tool)
        self._rules: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._known: KindsById = {}
        self._num_bytes = 0

    def _json(self, schema: object) -> str:
        """Return the rule of a value as JSON that matches a part of the tool's parameters; raises as `_counted`."""
        return self._counted(json_value(within(schema, self._root, strict=self._tool.strict)))

    def _counted(self, rule: str) -> str:
        """Return `rule`; raises ValidationError once the rules are too long, since many values may refer to one schema.

        A rule counts once more within the rule that it is a part of.
        """
        self._num_bytes += len(rule)
        check_size(self._num_bytes // 2)
        return rule

    def _kinds(self, schema: object) -> Kinds:
        """Return the types of the values that a part of the tool's parameters allows."""
        return kinds_of(schema, self._root, self._known)

    def _key_terminal(self, expression: str, known: Iterable[str]) -> str:
        """Return the terminal of a key that matches `expression`, and that is not `known`."""
        others = [f"~{pattern(escaped(name))}" for name in known]
        return self._terminal(" & ".join([pattern(expression), *others]))

    def _terminal(self, terminal: str) -> str:
        name = f"{self._rule}_{len(self._terminals)}".upper()
        self._terminals[name] = terminal
        return name


_MAX_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCall:
    """The texts around the name and the JSON arguments of a call."""

    before: tuple[str, ...]
    between: str
    behind: tuple[str, ...]
    optional: str = ""
    """A text that may precede the name."""


class NamedFormat(BlockFormat):
    """A call is a name and JSON arguments."""

    named: ClassVar[NamedCall]

    def reader(self, tools: Sequence[Tool], *, has_grammar: bool) -> NamedReader:  # noqa: ARG002
        return NamedReader(self.named, [tool.name for tool in tools])


@dataclass(frozen=True, slots=True)
class NamedReader:
    """Reads `before`, a name, perhaps `:` and a number, `between`, arguments and `behind`; blanks may be added."""

    call: NamedCall
    names: Sequence[str]

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
        name = yield from self._header(cursor)
        if not name or (yield from cursor.peek()) != "{":
            return False
        sink.start(name)
        if not (yield from cursor.json(sink.give)):
            return False
        sink.end()
        for text in self.call.behind:
            yield from cursor.close([text])
        return True

    def _header(self, cursor: Cursor) -> Wait[str]:
        """Read up to the arguments; return the name, "" if there is none."""
        for text in self.call.before:
            if not (yield from cursor.take([text])):
                return ""
            yield from cursor.skip()
        if self.call.optional:
            yield from cursor.take([self.call.optional])
        name = yield from cursor.take(self.names)
        if (yield from cursor.take([":"])):
            yield from cursor.skip("0123456789", _MAX_DIGITS)
        yield from cursor.skip()
        if not (yield from cursor.take([self.call.between])):
            return ""
        yield from cursor.skip()
        return name
