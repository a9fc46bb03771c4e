"""Calls whose parameters are in tags: their tags, reader and grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millrace_router.errors import ToolError
from millrace_router.request.request import Grammar
from millrace_router.request.schemas import Schema
from millrace_router.tool_calls.parsing.block_format import BlockFormat, CallGrammar
from millrace_router.tool_calls.parsing.block_parser import CallSink
from millrace_router.tool_calls.parsing.cursor import Cursor, Wait
from millrace_router.tool_calls.parsing.expression_reader import MAX_KEY, read_key
from millrace_router.tool_calls.parsing.lark import literal
from millrace_router.tool_calls.parsing.parameters import (
    Kinds,
    KindsById,
    ObjectSchema,
    check_keywords,
    kinds_of,
    resolved,
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
    closer: str = ""
    """The text behind a call where values may lack their end, as the family's own parser reads them."""
    end_is_closer: bool = False
    """Whether a call ends where its block ends."""
    spacing: str = "\n"
    """What a model writes between tags."""

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Texts of which one ends a value."""
        return self._padded(self.behind_value)

    def unclosed_ends(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Return the texts that end a value which is not closed: another of `keys`, or the end of the call."""
        if not self.closer:
            return ()
        tags = [f"{self.before_key}{key}{self.behind_key}" for key in keys if len(key) <= MAX_KEY]
        tags += [f"{self.end}{between}{self.closer}" for between in {"", self.spacing}]
        return tuple(end for tag in tags for end in self._padded(tag))

    def _padded(self, text: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys((f"{self.padding}{text}", text)))


_NOT_IN_KEYS = frozenset('<>"=\n')


class XmlReader:
    """Reads calls of `tools`; the schemas define the types of values."""

    def __init__(self, syntax: XmlSyntax, tools: Sequence[Tool], *, has_grammar: bool) -> None:
        """With `has_grammar` every value has its end."""
        self._syntax = syntax if not has_grammar else replace(syntax, closer="")
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._names = tuple(self._schemas)
        self._known: KindsById = {}

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
        properties = schema.get("properties")
        keys = [*properties] if isinstance(properties, dict) else []
        nexts = syntax.unclosed_ends(keys)
        tags = [syntax.before_key, syntax.end, *filter(None, [syntax.closer])]
        while True:
            yield from cursor.skip()
            tag = yield from cursor.take(tags)
            if tag != syntax.before_key:
                break
            key = yield from self._key(cursor, keys)
            if not key:
                return False
            sink.give(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if syntax.padding:
                # The newline before the end is not the one behind the key, if there is no text between them.
                yield from cursor.take([syntax.padding])
            kinds = self._kinds(schema, key)
            if not (
                yield from read_value(cursor, kinds, syntax.value_ends, sink.give, nexts=nexts)
            ):
                return False
        if tag:
            if syntax.end_is_closer or tag == syntax.closer:
                cursor.position -= len(tag)
            sink.give("{}" if before == "{" else "}")
            sink.end()
        return bool(tag)

    def _key(self, cursor: Cursor, keys: Iterable[str]) -> Wait[str]:
        """Read a key, and all texts up to its value; "" if no value follows. One of `keys` may have any characters."""
        syntax = self._syntax
        known = yield from cursor.take([f"{key}{syntax.behind_key}" for key in keys])
        key = known.removesuffix(syntax.behind_key)
        if not known:
            key = yield from read_key(cursor, _NOT_IN_KEYS)
            yield from cursor.skip()
            if not (yield from cursor.take([syntax.behind_key])):
                return ""
        if syntax.before_value:
            yield from cursor.skip()
            if not (yield from cursor.take([syntax.before_value])):
                return ""
        return key.strip()

    def _kinds(self, schema: Mapping[str, Any], key: str) -> Kinds:
        properties = schema.get("properties")
        if isinstance(properties, dict) and key in properties:
            return kinds_of(properties[key], dict(schema), self._known)
        return kinds_of(schema.get("additionalProperties", True), dict(schema), self._known)


_KEY = r'[^<>"=\s]{1,64}'
_UNION = frozenset({"type", "anyOf", "oneOf"})


class XmlGrammar(CallGrammar[XmlSyntax]):
    """Makes the rules of one call; their names begin with `rule`."""

    def rules(self) -> dict[str, str]:
        """Return the rules by name; raises ToolError if the tool is strict, and its schema cannot be kept."""
        syntax, strict = self._syntax, self._tool.strict
        schema = ObjectSchema.of(self._root, self._root, strict=strict)
        parts = [self._texts(syntax.before_name, self._tool.name, syntax.behind_name)]
        parts.append(self._texts(syntax.spacing))
        for name, value in schema.properties.items():
            part = f"{self._key(literal(name))} {self._value(value)}"
            parts.append(self._counted(part if name in schema.required else f"({part})?"))
        if schema.extra is not False:
            key = self._key_terminal(_KEY, schema.properties)
            parts.append(f"({self._key(key)} {self._value(schema.extra)})*")
        if not syntax.end_is_closer:
            parts.append(self._texts(syntax.end))
        return {self._rule: " ".join(filter(None, parts)), **self._rules, **self._terminals}

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
        kinds = self._kinds(schema)
        behind = self._texts(syntax.padding, syntax.behind_value, syntax.spacing)
        if self._tool.text is not None:
            return self._input(self._tool.text)
        target = resolved(schema, self._root)
        parameter = target if isinstance(target, dict) else {}
        check_keywords(parameter)
        if kinds is not None and "string" not in kinds:
            return f"{self._json(schema)} {behind}"
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
        self._rules[name] = plain_rule(text, padding if is_token else f"{padding}{mark}", mark)
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


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class XmlFormat(BlockFormat):
    """Each parameter is in tags; the schema defines the types of values."""

    xml: XmlSyntax

    def reader(self, tools: Sequence[Tool], *, has_grammar: bool) -> XmlReader:
        return XmlReader(self.xml, tools, has_grammar=has_grammar)

    def _rules_of_call(self, rule: str, tool: Tool) -> dict[str, str]:
        return XmlGrammar(self.xml, rule, tool, self._marker).rules()
