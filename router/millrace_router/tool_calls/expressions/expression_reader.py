"""Reads a call that is an expression, and gives its arguments as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from millrace_router.tool_calls.blocks.block_parser import CallSink
from millrace_router.tool_calls.blocks.cursor import Cursor, Wait
from millrace_router.tool_calls.expressions.expression_syntax import ExpressionSyntax
from millrace_router.tool_calls.expressions.literal_reader import LiteralReader, read_key
from millrace_router.tool_calls.tool import Tool

_LIST = "["
"""May be around calls."""


class ExpressionReader:
    """Reads calls of `tools`; each argument has a key."""

    def __init__(self, syntax: ExpressionSyntax, tools: Sequence[Tool]) -> None:
        self._syntax = syntax
        self._keys = {tool.name: _keys_of(tool) for tool in tools}
        self._names = tuple(self._keys)
        self._literals = LiteralReader(syntax)

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
        """See `CallReader`."""
        syntax = self._syntax
        opener, closer = syntax.edges
        yield from cursor.take([_LIST])
        yield from cursor.skip()
        if syntax.before_name and not (yield from cursor.take([syntax.before_name])):
            return False
        name = yield from cursor.take(self._names)
        yield from cursor.skip()
        if not (name and (yield from cursor.take([opener]))):
            return False
        yield from cursor.skip()
        if (yield from cursor.take([closer])):
            sink.start(name)
            sink.give("{}")
            return True
        key = yield from self._key(cursor, self._keys[name])
        if not key:
            return False
        sink.start(name)
        return (yield from self._arguments(cursor, sink, key, self._keys[name]))

    def _arguments(
        self, cursor: Cursor, sink: CallSink, key: str, known: Sequence[str]
    ) -> Wait[bool]:
        """Read from the value of the first argument, whose key is `key`, on."""
        before = "{"
        while True:
            sink.give(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._literals.read(cursor, sink.give)):
                return False
            yield from cursor.skip()
            is_more = bool((yield from cursor.take([","])))
            yield from cursor.skip()
            if (yield from cursor.take([self._syntax.edges[1]])):
                sink.give("}")
                return True
            key = (yield from self._key(cursor, known)) if is_more else ""
            if not key:
                return False

    def _key(self, cursor: Cursor, known: Sequence[str]) -> Wait[str]:
        """Read a key and the sign behind it; "" if there is none. Known keys may have any characters."""
        holds, cursor.holds = cursor.holds, True
        if not holds:
            cursor.drop()
        mark = cursor.place
        key = yield from cursor.take(known)
        yield from cursor.skip()
        if not (key and (yield from cursor.take([self._syntax.assign]))):
            cursor.place = mark
            key = yield from read_key(cursor)
            yield from cursor.skip()
            if not (key and (yield from cursor.take([self._syntax.assign]))):
                cursor.place = mark
                key = ""
        cursor.holds = holds
        return key


def _keys_of(tool: Tool) -> tuple[str, ...]:
    properties = tool.parameters.get("properties")
    return tuple(key for key in properties if key) if isinstance(properties, dict) else ()
