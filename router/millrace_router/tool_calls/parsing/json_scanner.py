"""Finds the end of one JSON value in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable

_BLANKS = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSERS = {"{": "}", "[": "]"}
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}

_DIGITS = "0123456789"
_EXPONENT = {"e": "e", "E": "e"}
_NUMBER: dict[str, dict[str, str]] = {
    "-": {"0": "0", **dict.fromkeys("123456789", "int")},
    "0": {".": ".", **_EXPONENT},
    "int": {**dict.fromkeys(_DIGITS, "int"), ".": ".", **_EXPONENT},
    ".": dict.fromkeys(_DIGITS, "fraction"),
    "fraction": {**dict.fromkeys(_DIGITS, "fraction"), **_EXPONENT},
    "e": {**dict.fromkeys(_DIGITS, "exponent"), "+": "sign", "-": "sign"},
    "sign": dict.fromkeys(_DIGITS, "exponent"),
    "exponent": dict.fromkeys(_DIGITS, "exponent"),
}
"""State of a number to its next states, by the next character."""
_WHOLE_NUMBERS = frozenset({"0", "int", "fraction", "exponent"})


class JsonScanner:
    """Scans one value of RFC 8259 from its first character on; `push` until `ended` or `failed`."""

    def __init__(self) -> None:
        self.ended = False
        self.failed = False
        self._open: list[str] = []
        """Open brackets."""
        self._is_key = False
        self._rest = ""
        """The missing characters of a literal, or the state of a number."""
        self._num_hex = 0
        self._step: Callable[[str, int], int] = self._value

    def push(self, text: str, start: int = 0) -> int:
        """Scan text from `start` on; return the position after the value, or of an invalid character."""
        while start < len(text) and not (self.ended or self.failed):
            start = self._step(text, start)
        return start

    def _fail(self, start: int) -> int:
        self.failed = True
        return start

    def _value(self, text: str, start: int) -> int:
        char = text[start]
        if char in _CLOSERS:
            self._open.append(char)
            self._step = self._first
        elif char == '"':
            self._step = self._string
        elif char in _LITERALS:
            self._rest = _LITERALS[char]
            self._step = self._literal
        elif char == "-" or char in _DIGITS:
            self._rest = char if char in "-0" else "int"
            self._step = self._number
        else:
            return self._fail(start)
        return start + 1

    def _first(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] == _CLOSERS[self._open[-1]]:
            return self._close(start)
        self._step = self._item
        return start

    def _item(self, text: str, start: int) -> int:
        """Before a member's name, or before a value of an array."""
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if self._open[-1] == "[":
            return self._value(text, start)
        if text[start] != '"':
            return self._fail(start)
        self._is_key = True
        self._step = self._string
        return start + 1

    def _string(self, text: str, start: int) -> int:
        start = _PLAIN.match(text, start).end()  # type: ignore[union-attr]  # the empty text matches too
        if start == len(text):
            return start
        if text[start] == "\\":
            self._step = self._escape
        elif text[start] == '"':
            self._end_string()
        else:
            return self._fail(start)
        return start + 1

    def _end_string(self) -> None:
        if self._is_key:
            self._is_key = False
            self._step = self._colon
        else:
            self._end_value()

    def _escape(self, text: str, start: int) -> int:
        char = text[start]
        if char == "u":
            self._num_hex = 4
            self._step = self._code
        elif char in '"\\/bfnrt':
            self._step = self._string
        else:
            return self._fail(start)
        return start + 1

    def _code(self, text: str, start: int) -> int:
        if text[start] not in _HEX:
            return self._fail(start)
        self._num_hex -= 1
        if not self._num_hex:
            self._step = self._string
        return start + 1

    def _colon(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] != ":":
            return self._fail(start)
        self._step = self._spaced_value
        return start + 1

    def _spaced_value(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        return start if start == len(text) else self._value(text, start)

    def _literal(self, text: str, start: int) -> int:
        if text[start] != self._rest[0]:
            return self._fail(start)
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return start + 1

    def _number(self, text: str, start: int) -> int:
        part = _NUMBER[self._rest].get(text[start])
        if part is not None:
            self._rest = part
            return start + 1
        if self._rest not in _WHOLE_NUMBERS:
            return self._fail(start)
        self._end_value()
        return start

    def _end_value(self) -> None:
        self._step = self._next
        self.ended = not self._open

    def _next(self, text: str, start: int) -> int:
        """After a value in its container."""
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] == ",":
            self._step = self._item
            return start + 1
        if text[start] == _CLOSERS[self._open[-1]]:
            return self._close(start)
        return self._fail(start)

    def _close(self, start: int) -> int:
        self._open.pop()
        self._end_value()
        return start + 1


def behind_blanks(text: str, start: int) -> int:
    """Return the position of the first character from `start` on that is no JSON white space."""
    return _BLANKS.match(text, start).end()  # type: ignore[union-attr]  # the empty text matches too
