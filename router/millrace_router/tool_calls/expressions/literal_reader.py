"""Reads literals of expressions, and gives them as JSON while they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress

from millrace_router.tool_calls.blocks.cursor import Cursor, Give, Wait
from millrace_router.tool_calls.expressions.expression_syntax import ExpressionSyntax
from millrace_router.tool_calls.expressions.python_string import QUOTES, read_string
from millrace_router.tool_calls.parameters.text_value import escaped

MAX_LEVELS = 64
MAX_KEY = 128
"""Characters of a key, a number or a word."""
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER = frozenset("0123456789.+-_abcdefABCDEFxXoO")
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_")
_NOT_IN_KEYS = frozenset(" \t\n\r=:,(){}[]'\"<>|")
_CLOSERS: Mapping[str, str] = {"[": "]", "(": ")", "{": "}"}


class LiteralReader:
    """Reads strings, numbers, words, lists, tuples and objects; other expressions are none."""

    def __init__(self, syntax: ExpressionSyntax) -> None:
        self._syntax = syntax
        self._quotes = (syntax.quote,) if syntax.quote else QUOTES

    def read(self, cursor: Cursor, give: Give, num_levels: int = MAX_LEVELS) -> Wait[bool]:
        """Pass the JSON of a literal on; False if there is none, or if it is cut off."""
        yield from cursor.skip()
        quote = yield from cursor.take(self._quotes)
        if quote:
            return (yield from self._string(cursor, quote, give))
        char = yield from cursor.peek()
        if char in _CLOSERS and char:
            cursor.place += 1
            return num_levels > 0 and (yield from self._items(cursor, char, give, num_levels - 1))
        text = yield from _run(cursor, _NUMBER | _LETTERS)
        if not (yield from cursor.peek()):
            # More of the number or the word might have followed.
            return False
        json_text = self._syntax.words.get(text) or _number(text)
        if not json_text:
            cursor.put_back(text)
        give(json_text)
        return bool(json_text)

    def _string(self, cursor: Cursor, quote: str, give: Give) -> Wait[bool]:
        give('"')
        if self._syntax.quote:
            is_whole = bool((yield from cursor.copy([quote], lambda text: give(escaped(text)))))
        else:
            is_whole = yield from read_string(cursor, quote, give)
        give('"' if is_whole else "")
        return is_whole

    def _items(self, cursor: Cursor, opener: str, give: Give, num_levels: int) -> Wait[bool]:
        """Read what follows an opening bracket; tuples become arrays."""
        closer = _CLOSERS[opener]
        give("{" if opener == "{" else "[")
        separator = ""
        while True:
            yield from cursor.skip()
            if (yield from cursor.take([closer])):
                give("}" if opener == "{" else "]")
                return True
            give(separator)
            separator = ", "
            if opener == "{" and not (yield from self._member_key(cursor, give)):
                return False
            if not (yield from self.read(cursor, give, num_levels)):
                return False
            yield from cursor.skip()
            if not (yield from cursor.take([","])) and (yield from cursor.peek()) != closer:
                return False

    def _member_key(self, cursor: Cursor, give: Give) -> Wait[bool]:
        quote = yield from cursor.take(self._quotes)
        if quote:
            if not (yield from self._string(cursor, quote, give)):
                return False
        else:
            key = (yield from read_key(cursor)) if self._syntax.has_bare_keys else ""
            if not key:
                return False
            give(json.dumps(key, ensure_ascii=False))
        give(": ")
        yield from cursor.skip()
        return bool((yield from cursor.take([":"])))


def read_key(cursor: Cursor) -> Wait[str]:
    """Read a key without quotes; "" if there is none."""
    parts: list[str] = []
    while len(parts) < MAX_KEY:
        char = yield from cursor.peek()
        if not char or char in _NOT_IN_KEYS:
            break
        parts.append(char)
        cursor.place += 1
    return "".join(parts)


def _run(cursor: Cursor, characters: frozenset[str]) -> Wait[str]:
    """Read at most `MAX_KEY` of `characters`."""
    parts: list[str] = []
    while len(parts) < MAX_KEY:
        char = yield from cursor.peek()
        if not char or char not in characters:
            break
        parts.append(char)
        cursor.place += 1
    return "".join(parts)


def _number(text: str) -> str:
    """The JSON of one of Python's numbers; "" if it is none, or has no JSON."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if text[:1] in _LETTERS:
        return ""
    with suppress(ValueError):
        return str(int(text, 0))
    with suppress(ValueError):
        number = float(text)
        return repr(number) if math.isfinite(number) else ""
    return ""
