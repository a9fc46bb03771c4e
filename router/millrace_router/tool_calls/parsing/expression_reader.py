"""Reads a call that is an expression, and gives its arguments as JSON while they are read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from millrace_router.tool_calls.parsing.block_parser import CallSink
from millrace_router.tool_calls.parsing.cursor import Cursor, Give, Wait
from millrace_router.tool_calls.parsing.json_mender import json_escaped
from millrace_router.tool_calls.tool import Tool

JSON_WORDS = {"true": "true", "false": "false", "null": "null"}
_WORDS: Mapping[str, str] = {**JSON_WORDS, "True": "true", "False": "false", "None": "null"}
"""JSON of the words that stand for values: models write JSON's and Python's, whatever their template shows."""
_ASSIGNS = (":", "=")
"""Texts of which one is between a key and a value: models write both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpressionSyntax:
    """The texts of one call. Blanks are allowed between any two of them."""

    before_name: str = ""
    edges: tuple[str, str] = ("(", ")")
    """Texts around the arguments."""
    assign: str = "="
    """Between a key and a value of the arguments."""
    comma: str = ", "
    """What a model writes between two values."""
    colon: str = ": "
    """What a model writes between a key and a value of an object."""
    quote: str = ""
    """The text on both sides of a string without escapes, in addition to Python's strings; empty for Python's only."""
    written: Mapping[str, str] = field(default_factory=lambda: JSON_WORDS)
    """The word that a grammar demands, by JSON."""

    @property
    def has_bare_keys(self) -> bool:
        """Whether the keys of objects are bare words instead of strings."""
        return bool(self.quote)


PYTHON = ExpressionSyntax(written={"true": "True", "false": "False", "null": "None"})


QUOTES = ('"""', "'''", '"', "'")
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
_NUM_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def read_string(cursor: Cursor, quote: str, give: Give) -> Wait[bool]:
    """Pass a string on up to `quote`, which is stepped over; False if the answer ends before it.

    Unknown escapes stay as they are, and newlines are allowed, both as models write them.
    """
    while True:
        end = yield from cursor.copy([quote, "\\"], lambda text: give(json_escaped(text)))
        if end != "\\":
            return bool(end)
        text = yield from _escape(cursor)
        if text is None:
            return False
        give(json_escaped(text))


def _escape(cursor: Cursor) -> Wait[str | None]:
    """Return the text of an escape behind its backslash; None at the end of the answer."""
    char = yield from cursor.peek()
    if not char:
        return None
    cursor.position += 1
    if char in _NUM_DIGITS:
        digits = yield from _digits(cursor, _NUM_DIGITS[char])
        if len(digits) < _NUM_DIGITS[char]:
            if not (yield from cursor.peek()):
                return None
            return f"\\{char}{digits}"
        return (yield from _character(cursor, int(digits, 16)))
    return _ESCAPES.get(char, f"\\{char}")


def _character(cursor: Cursor, code: int) -> Wait[str | None]:
    """Return the character of a code, joined with the second half of a pair; None if the answer ends within a pair."""
    if not 0xD800 <= code < 0xDC00:
        is_character = code < 0xD800 or 0xE000 <= code < 0x110000
        return chr(code) if is_character else _REPLACEMENT
    if not (yield from cursor.take(["\\u"])):
        return None if cursor.text[cursor.position :] in {"", "\\"} else _REPLACEMENT
    digits = yield from _digits(cursor, 4)
    if len(digits) < 4 and not (yield from cursor.peek()):
        return None
    low = int(digits, 16) if len(digits) == 4 else 0
    if 0xDC00 <= low < 0xE000:
        return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return f"{_REPLACEMENT}\\u{digits}"


def _digits(cursor: Cursor, num_digits: int) -> Wait[str]:
    digits: list[str] = []
    while len(digits) < num_digits:
        char = yield from cursor.peek()
        if char not in _HEX or not char:
            break
        digits.append(char)
        cursor.position += 1
    return "".join(digits)


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
        self._quotes = (syntax.quote, *QUOTES) if syntax.quote else QUOTES

    def read(self, cursor: Cursor, give: Give, num_levels: int = MAX_LEVELS) -> Wait[bool]:
        """Pass the JSON of a literal on; False if there is none, or if it is cut off."""
        yield from cursor.skip()
        quote = yield from cursor.take(self._quotes)
        if quote:
            return (yield from self._string(cursor, quote, give))
        char = yield from cursor.peek()
        if char in _CLOSERS and char:
            cursor.position += 1
            return num_levels > 0 and (yield from self._items(cursor, char, give, num_levels - 1))
        text = yield from _run(cursor, _NUMBER | _LETTERS)
        if not (yield from cursor.peek()):
            # More of the number or the word might have followed.
            return False
        json_text = _WORDS.get(text) or _number(text)
        if not json_text:
            cursor.put_back(text)
        give(json_text)
        return bool(json_text)

    def _string(self, cursor: Cursor, quote: str, give: Give) -> Wait[bool]:
        give('"')
        if quote == self._syntax.quote:
            is_whole = bool(
                (yield from cursor.copy([quote], lambda text: give(json_escaped(text))))
            )
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
        return bool((yield from cursor.take(_ASSIGNS)))


def literal_json(text: str) -> str | None:
    """Return the JSON of a whole literal in brackets; None for another text."""
    cursor, parts = Cursor(), list[str]()
    cursor.text, cursor.is_last = text, True
    try:
        # A cursor at the end of the answer never waits.
        next(LiteralReader(PYTHON).read(cursor, parts.append))
    except StopIteration as end:
        return "".join(parts) if end.value and cursor.position == len(text) else None
    raise AssertionError


def read_key(cursor: Cursor, ends: Container[str] = _NOT_IN_KEYS) -> Wait[str]:
    """Read a key without quotes up to one of the characters `ends`; "" if there is none."""
    parts: list[str] = []
    while len(parts) < MAX_KEY:
        char = yield from cursor.peek()
        if not char or char in ends:
            break
        parts.append(char)
        cursor.position += 1
    return "".join(parts)


def _run(cursor: Cursor, characters: frozenset[str]) -> Wait[str]:
    """Read at most `MAX_KEY` of `characters`."""
    parts: list[str] = []
    while len(parts) < MAX_KEY:
        char = yield from cursor.peek()
        if not char or char not in characters:
            break
        parts.append(char)
        cursor.position += 1
    return "".join(parts)


def _number(text: str) -> str:
    """Return the JSON of one of Python's numbers; "" if it is none, or has no JSON."""
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


_LIST = "["
"""May be around calls."""


class ExpressionReader:
    """Reads calls of `tools`; each argument has a key."""

    def __init__(self, syntax: ExpressionSyntax, tools: Sequence[Tool]) -> None:
        self._syntax = syntax
        self._keys = {tool.name: _keys_of(tool) for tool in tools}
        self._names = tuple(self._keys)
        self._literals = LiteralReader(syntax)
        self._quotes = ("", syntax.quote, '"', "'")

    def read(self, cursor: Cursor, sink: CallSink) -> Wait[bool]:
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
            sink.end()
            return True
        key = yield from self._key(cursor, self._keys[name])
        if not key:
            return False
        sink.start(name)
        return (yield from self._arguments(cursor, sink, key, self._keys[name]))

    def _arguments(
        self, cursor: Cursor, sink: CallSink, key: str, keys: Sequence[str]
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
                sink.end()
                return True
            key = (yield from self._key(cursor, keys)) if is_more else ""
            if not key:
                return False

    def _key(self, cursor: Cursor, keys: Sequence[str]) -> Wait[str]:
        """Read a key and the sign behind it; "" if there is none. Known keys may have any characters."""
        holds, cursor.holds = cursor.holds, True
        if not holds:
            cursor.drop()
        mark = cursor.position
        quote = yield from cursor.take(self._quotes)
        key = yield from cursor.take(keys)
        if not (key and (yield from self._is_assigned(cursor, quote))):
            cursor.position = mark
            yield from cursor.take([quote])
            key = yield from read_key(cursor)
            if not (key and (yield from self._is_assigned(cursor, quote))):
                cursor.position = mark
                key = ""
        cursor.holds = holds
        return key

    def _is_assigned(self, cursor: Cursor, quote: str) -> Wait[bool]:
        """Step over what is between a key and its value; whether all of it follows."""
        if quote and not (yield from cursor.take([quote])):
            return False
        yield from cursor.skip()
        return bool((yield from cursor.take(_ASSIGNS)))


def _keys_of(tool: Tool) -> tuple[str, ...]:
    properties = tool.parameters.get("properties")
    return tuple(key for key in properties if key) if isinstance(properties, dict) else ()
