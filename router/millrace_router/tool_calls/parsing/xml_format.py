"""Calls whose parameters are in tags: their tags, reader and grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace_router.errors import ToolError
from millrace_router.request.request import Grammar
from millrace_router.request.schemas import Schema
from millrace_router.tool_calls.parsing.block_format import BlockFormat
from millrace_router.tool_calls.parsing.block_parser import CallSink
from millrace_router.tool_calls.parsing.cursor import Cursor, Wait
from millrace_router.tool_calls.parsing.lark import escaped, json_value, literal, pattern
from millrace_router.tool_calls.parsing.parameters import (
    Kinds,
    ObjectSchema,
    check_keywords,
    kinds_of,
    resolved,
    schema_of,
    within,
)
from millrace_router.tool_calls.parsing.text_rule import plain_rule
from millrace_router.tool_calls.parsing.text_values import read_value, text_terminal
from millrace_router.tool_calls.tool import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlSyntax:
    """The texts of one call. Blanks are allowed between any two tags."""

    before_name: str
    behind_name: str
    """Empty if a key or the end of the call follows the name."""
    before_key: str
    behind_key: str
    before_value: str = ""
    """A tag between key and value."""
    padding: str = ""
    """One of it at either end of a value does not belong to it."""
    behind_value: str
    end: str
    end_is_closer: bool = False
    """Whether a call ends where its block ends."""
    spacing: str = "\n"
    """What a model writes between tags."""

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Texts of which one ends a value."""
        padded = f"{self.padding}{self.behind_value}"
        return tuple(dict.fromkeys((padded, self.behind_value)))


class XmlReader:
    """Reads calls of `tools`; the schemas define the types of values."""

    def __init__(self, syntax: XmlSyntax, tools: Sequence[Tool]) -> None:
        self._syntax = syntax
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._names = tuple(self._schemas)

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
        syntax = self._syntax
        if syntax.before_name and not (yield from cursor.take([syntax.before_name])):
            return False
        name = yield from cursor.take(self._names)
        if not name:
            return False
        yield from cursor.skip()
        begun = [syntax.behind_name] if syntax.behind_name else [syntax.before_key, syntax.end]
        mark = cursor.position
        if not (yield from cursor.take(begun)):
            return False
        if not syntax.behind_name:
            cursor.position = mark
        sink.start(name)
        return (yield from self._parameters(cursor, sink, self._schemas[name]))

    def _parameters(self, cursor: Cursor, sink: CallSink, schema: Mapping[str, Any]) -> Wait[bool]:
        syntax, before = self._syntax, "{"
        while True:
            yield from cursor.skip()
            tag = yield from cursor.take([syntax.before_key, syntax.end])
            if tag != syntax.before_key:
                break
            key = yield from self._key(cursor, sink, before)
            if key is None:
                return False
            before = ", "
            if not (yield from self._value(cursor, sink, _kinds(schema, key))):
                return False
        if tag:
            sink.give("{}" if before == "{" else "}")
            cursor.position -= len(tag) if syntax.end_is_closer else 0
        return bool(tag)

    def _key(self, cursor: Cursor, sink: CallSink, before: str) -> Wait[str | None]:
        """Read a key, and all texts up to its value, and put it behind `before`; None if no value follows."""
        syntax = self._syntax
        parts: list[str] = []
        is_whole = bool((yield from cursor.copy([syntax.behind_key], parts.append)))
        key = "".join(parts).strip()
        written = f"{before}{json.dumps(key, ensure_ascii=False)}"
        if not is_whole:
            sink.give(written[:-1])
            return None
        if syntax.before_value:
            yield from cursor.skip()
            if not (yield from cursor.take([syntax.before_value])):
                sink.give(written)
                return None
        sink.give(f"{written}: ")
        return key

    def _value(self, cursor: Cursor, sink: CallSink, kinds: Kinds) -> Wait[bool]:
        if self._syntax.padding:
            # The newline before the end is not the one behind the key, if there is no text between them.
            yield from cursor.take([self._syntax.padding])
        return (yield from read_value(cursor, kinds, self._syntax.value_ends, sink.give))


def _kinds(schema: Mapping[str, Any], key: str) -> Kinds:
    properties = schema.get("properties")
    if isinstance(properties, dict) and key in properties:
        return kinds_of(properties[key], dict(schema))
    return kinds_of(schema.get("additionalProperties", True), dict(schema))


_KEY = r'[^<>"=\s]{1,64}'
_UNION = frozenset({"type", "anyOf", "oneOf"})


class XmlGrammar:
    """Makes the rules of one call; their names begin with `rule`."""

    def __init__(
        self, syntax: XmlSyntax, rule: str, tool: Tool, marker: Callable[[str], str]
    ) -> None:
        """`marker` makes the rule of a tag, which may be a token. Raises as `arguments_schema` does."""
        self._syntax = syntax
        self._rule = rule
        self._tool = tool
        self._marker = marker
        self._root: Schema = schema_of(tool)
        self._terminals: dict[str, str] = {}
        self._inputs: dict[str, str] = {}
        """The rule of a text tool's input."""

    def rules(self) -> dict[str, str]:
        """Return the rules by name; raises ToolError if the tool is strict, and its schema cannot be kept."""
        syntax, strict = self._syntax, self._tool.strict
        schema = ObjectSchema.of(self._root, self._root, strict=strict)
        parts = [self._texts(syntax.before_name, self._tool.name, syntax.behind_name)]
        parts.append(self._texts(syntax.spacing))
        for name, value in schema.properties.items():
            part = f"{self._key(literal(name))} {self._value(value)}"
            parts.append(part if name in schema.required else f"({part})?")
        if schema.extra is not False:
            others = [f"~{pattern(escaped(name))}" for name in schema.properties]
            key = self._terminal(" & ".join([pattern(_KEY), *others]))
            parts.append(f"({self._key(key)} {self._value(schema.extra)})*")
        if not syntax.end_is_closer:
            parts.append(self._texts(syntax.end))
        return {self._rule: " ".join(filter(None, parts)), **self._inputs, **self._terminals}

    def _texts(self, *texts: str) -> str:
        return " ".join(self._marker(text) for text in texts if text)

    def _key(self, key: str) -> str:
        """Return the rule of a key and all texts around it."""
        syntax = self._syntax
        between = syntax.spacing if syntax.before_value else ""
        behind = (syntax.behind_key, between, syntax.before_value, syntax.padding)
        return f"{self._texts(syntax.before_key)} {key} {self._texts(*behind)}"

    def _value(self, schema: object) -> str:
        """Return the rule of a value and what is behind it."""
        syntax, strict = self._syntax, self._tool.strict
        kinds = kinds_of(schema, self._root)
        behind = self._texts(syntax.padding, syntax.behind_value, syntax.spacing)
        if self._tool.text is not None:
            return self._input(self._tool.text)
        target = resolved(schema, self._root)
        parameter = target if isinstance(target, dict) else {}
        check_keywords(parameter)
        if kinds is not None and "string" not in kinds:
            return f"{json_value(within(schema, self._root, strict=strict))} {behind}"
        choices = [parameter["const"]] if "const" in parameter else parameter.get("enum")
        if choices:
            return f"({' | '.join(literal(_written(one)) for one in choices)}) {behind}"
        is_text = kinds == frozenset({"string"})
        if not is_text and strict and parameter.keys() - _UNION:
            raise ToolError("this model's format cannot keep keywords of a value of several types")
        return self._text(parameter if is_text else {})

    def _input(self, text: Grammar) -> str:
        """Return the rule of a text tool's input and what is behind it."""
        name, mark, padding = f"{self._rule}_text", self._syntax.behind_value, self._syntax.padding
        is_token = self._marker(mark) != literal(mark)
        self._inputs[name] = plain_rule(text, padding if is_token else f"{padding}{mark}", mark)
        return f"{name} {self._texts(mark if is_token else '', self._syntax.spacing)}"

    def _text(self, schema: Schema) -> str:
        """Return the rule of a string and what is behind it."""
        syntax, strict = self._syntax, self._tool.strict
        mark, padding = syntax.behind_value, syntax.padding
        if self._marker(mark) != literal(mark):
            terminal = self._terminal(text_terminal(schema, padding, mark, strict=strict))
            return f"{terminal}? {self._texts(mark, syntax.spacing)}"
        terminal = text_terminal(schema, f"{padding}{mark}", mark, strict=strict)
        return f"{self._terminal(terminal)} {self._texts(syntax.spacing)}"

    def _terminal(self, terminal: str) -> str:
        name = f"{self._rule}_{len(self._terminals)}".upper()
        self._terminals[name] = terminal
        return name


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class XmlFormat(BlockFormat):
    """Each parameter is in tags; the schema defines the types of values."""

    xml: XmlSyntax

    def reader(self, tools: Sequence[Tool]) -> XmlReader:
        return XmlReader(self.xml, tools)

    def _rules_of_call(self, rule: str, tool: Tool) -> dict[str, str]:
        return XmlGrammar(self.xml, rule, tool, self._marker).rules()
