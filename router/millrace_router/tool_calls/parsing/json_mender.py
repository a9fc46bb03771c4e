"""Reads one JSON value from text that arrives in pieces, and mends usual flaws of models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

_BLANKS = re.compile(r"[ \t\n\r]*")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"""[^'"\\\x00-\x1f]*""")}
"""Characters that stay as they are within quotes."""
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = frozenset('"\\/bfnrt')
_CLOSERS = {"{": "}", "[": "]"}
_WORDS = {
    "t": ("rue", "true"), "f": ("alse", "false"), "n": ("ull", "null"),
    "T": ("rue", "true"), "F": ("alse", "false"), "N": ("one", "null"),
}  # fmt: skip
"""The rest of a word of JSON or Python, and what is written, by the first character."""
MAX_LEVELS = 128
"""More are refused: clients' parsers end at about 200."""
_REPLACEMENT = "\\ufffd"

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

Reader = TypeVar("Reader")
Step = Callable[[Reader, str, int], int]
"""Reads on from a position of a text, and returns the next one."""


def behind_blanks(text: str, start: int) -> int:
    """Return the position of the first character from `start` on that is no JSON white space."""
    return _BLANKS.match(text, start).end()  # type: ignore[union-attr]  # the empty text matches too


def spaced(step: Step[Reader]) -> Step[Reader]:
    """Let `step` begin at the first character that is no white space, once there is one."""

    @wraps(step)
    def skip(reader: Reader, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        return start if start == len(text) else step(reader, text, start)

    return skip


def json_escaped(text: str) -> str:
    """Return the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def mended(text: str) -> str | None:
    """Return the JSON of a whole value, None if `text` is none that can be mended."""
    mender = JsonMender()
    # A number ends with the character behind it.
    stop, value = mender.push(f"{text} ")
    return value if mender.ended and stop >= len(text) > 0 else None


class JsonMender:
    """Reads one value from its first character on, and returns JSON by RFC 8259; `push` until `ended` or `failed`.

    A value that follows the standard stays as it is, except half of a surrogate pair, which is replaced. Mended are
    control characters and unknown escapes in strings, strings in single quotes, Python's words, and a comma before a
    closing bracket. Everything else fails.
    """

    def __init__(self) -> None:
        self.ended = False
        self.failed = False
        self.held = ""
        """Text that was read, and whose JSON is not decided yet."""
        self._given: list[str] = []
        self._open: list[str] = []
        """Open brackets."""
        self._is_key = False
        self._quote = '"'
        self._high = ""
        """The escape of half a character, which waits for the second."""
        self._word = ("", "")
        self._number_state = ""
        self._step: Callable[[str, int], int] = self._value

    def push(self, text: str, start: int = 0) -> tuple[int, str]:
        """Read text from `start` on; return the position after the value, or of an invalid character, and new JSON."""
        while start < len(text) and not (self.ended or self.failed):
            start = self._step(text, start)
        given = "".join(self._given)
        self._given.clear()
        return start, given

    def _give(self, text: str, step: Callable[[str, int], int] | None = None) -> None:
        self._given.append(text)
        self.held = ""
        if step is not None:
            self._step = step

    def _fail(self, start: int) -> int:
        self.failed = True
        return start

    def _skip(self, text: str, start: int) -> int:
        """Pass blanks on; return the position behind them."""
        end = behind_blanks(text, start)
        if end > start:
            self._given.append(text[start:end])
        return end

    def _value(self, text: str, start: int) -> int:
        start = self._skip(text, start) if self._open else start
        if start == len(text):
            return start
        char = text[start]
        if char in _CLOSERS and len(self._open) < MAX_LEVELS:
            self._open.append(char)
            self._give(char, self._first)
        elif char in _PLAIN:
            self._quote = char
            self._give('"', self._string)
        elif char in _WORDS:
            rest, written = _WORDS[char]
            self._word = rest, written[1:]
            self._give(written[0], self._in_word)
        elif char == "-" or char in _DIGITS:
            self._number_state = char if char in "-0" else "int"
            self._give(char, self._number)
        else:
            return self._fail(start)
        return start + 1

    def _first(self, text: str, start: int) -> int:
        start = self._skip(text, start)
        if start < len(text):
            if text[start] == _CLOSERS[self._open[-1]]:
                return self._close(start)
            self._step = self._item
        return start

    def _item(self, text: str, start: int) -> int:
        """Before a member's name, or before a value of an array."""
        if self._open[-1] == "[":
            return self._value(text, start)
        if text[start] not in _PLAIN:
            return self._fail(start)
        self._is_key = True
        self._quote = text[start]
        self._give('"', self._string)
        return start + 1

    def _string(self, text: str, start: int) -> int:
        if self._high and text[start] != "\\":
            self._give_half()
        end = _PLAIN[self._quote].match(text, start).end()  # type: ignore[union-attr]  # the empty text matches too
        if end > start:
            self._give(text[start:end])
        if end == len(text):
            return end
        char = text[end]
        if char == "\\":
            self.held += char
            self._step = self._escape
        elif char == self._quote:
            self._give('"')
            self._end_string()
        else:
            self._give(json_escaped(char))
        return end + 1

    def _end_string(self) -> None:
        if self._is_key:
            self._is_key = False
            self._step = self._colon
        else:
            self._end_value()

    def _escape(self, text: str, start: int) -> int:
        char = text[start]
        if char == "u":
            self.held += char
            self._step = self._code
            return start + 1
        if self._high:
            self._give_half()
        if char in _ESCAPES:
            self._give(f"\\{char}", self._string)
            return start + 1
        if char == "'":
            self._give(char, self._string)
            return start + 1
        # The backslash means itself, as models write it in expressions and paths.
        self._give("\\\\", self._string)
        return start

    def _code(self, text: str, start: int) -> int:
        code = self.held.removeprefix(self._high)
        char = text[start]
        if char not in _HEX:
            if self._high:
                self._give_half()
            self._give(f"\\{code}", self._string)
            return start
        self.held += char
        code += char
        if len(code) == len("\\u0000"):
            self._step = self._string
            self._end_code(code)
        return start + 1

    def _end_code(self, code: str) -> None:
        number = int(code[2:], 16)
        if self._high and 0xDC00 <= number < 0xE000:
            self._give(self._high + code)
            self._high = ""
            return
        if self._high:
            self._give_half()
        if 0xD800 <= number < 0xDC00:
            self.held = self._high = code
        else:
            self._give(_REPLACEMENT if 0xDC00 <= number < 0xE000 else code)

    def _give_half(self) -> None:
        """Replace half a character, without its second half; what is held behind it stays so."""
        held = self.held.removeprefix(self._high)
        self._give(_REPLACEMENT)
        self.held, self._high = held, ""

    def _colon(self, text: str, start: int) -> int:
        start = self._skip(text, start)
        if start == len(text):
            return start
        if text[start] != ":":
            return self._fail(start)
        self._give(":", self._value)
        return start + 1

    def _in_word(self, text: str, start: int) -> int:
        rest, written = self._word
        if text[start] != rest[0]:
            return self._fail(start)
        self._give(written[0])
        self._word = rest[1:], written[1:]
        if len(rest) == 1:
            self._end_value()
        return start + 1

    def _number(self, text: str, start: int) -> int:
        state = _NUMBER[self._number_state].get(text[start])
        if state is not None:
            self._number_state = state
            self._give(text[start])
            return start + 1
        if self._number_state not in _WHOLE_NUMBERS:
            return self._fail(start)
        self._end_value()
        return start

    def _end_value(self) -> None:
        self._step = self._next
        self.ended = not self._open

    def _next(self, text: str, start: int) -> int:
        """After a value in its container."""
        start = self._skip(text, start)
        if start == len(text):
            return start
        if text[start] == ",":
            self.held = ","
            self._step = self._behind_comma
            return start + 1
        if text[start] == _CLOSERS[self._open[-1]]:
            return self._close(start)
        return self._fail(start)

    def _behind_comma(self, text: str, start: int) -> int:
        """After a comma, which is dropped if no item follows."""
        end = behind_blanks(text, start)
        self.held += text[start:end]
        if end == len(text):
            return end
        if text[end] == _CLOSERS[self._open[-1]]:
            self._give(self.held[1:])
            return self._close(end)
        self._give(self.held, self._item)
        return end

    def _close(self, start: int) -> int:
        self._give(_CLOSERS[self._open.pop()])
        self._end_value()
        return start + 1
