"""Reads the inside of one of Python's strings, and gives it as the inside of a JSON string while it is read."""

from __future__ import annotations

from millrace_router.tool_calls.blocks.cursor import Cursor, Give, Wait
from millrace_router.tool_calls.parameters.text_value import escaped

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
        end = yield from cursor.copy([quote, "\\"], lambda text: give(escaped(text)))
        if end != "\\":
            return bool(end)
        text = yield from _escape(cursor)
        if text is None:
            return False
        give(escaped(text))


def _escape(cursor: Cursor) -> Wait[str | None]:
    """Return the text of an escape behind its backslash; None at the end of the answer."""
    char = yield from cursor.peek()
    if not char:
        return None
    cursor.place += 1
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
        return None if cursor.text[cursor.place :] in {"", "\\"} else _REPLACEMENT
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
        cursor.place += 1
    return "".join(digits)
