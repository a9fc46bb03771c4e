"""Reads a call whose parameters are in tags, and gives its arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace_router.tool_calls.blocks.block_parser import CallSink
from millrace_router.tool_calls.blocks.cursor import Cursor, Wait
from millrace_router.tool_calls.parameters.kinds import Kinds, kinds_of
from millrace_router.tool_calls.parameters.text_value import read_value
from millrace_router.tool_calls.tool import Tool
from millrace_router.tool_calls.xml.xml_syntax import XmlSyntax


class XmlReader:
    """Reads calls of `tools`; the schemas tell the types of values."""

    def __init__(self, syntax: XmlSyntax, tools: Sequence[Tool]) -> None:
        self._syntax = syntax
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._names = tuple(self._schemas)

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
        """See `CallReader`."""
        syntax = self._syntax
        if syntax.before_name and not (yield from cursor.take([syntax.before_name])):
            return False
        name = yield from cursor.take(self._names)
        if not name:
            return False
        yield from cursor.skip()
        begun = [syntax.behind_name] if syntax.behind_name else [syntax.before_key, syntax.end]
        mark = cursor.place
        if not (yield from cursor.take(begun)):
            return False
        if not syntax.behind_name:
            cursor.place = mark
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
            cursor.place -= len(tag) if syntax.end_is_closer else 0
        return bool(tag)

    def _key(self, cursor: Cursor, sink: CallSink, before: str) -> Wait[str | None]:
        """Read a key, and all texts up to its value, and give it behind `before`; None if there is no value."""
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
