"""One call in text that is still coming: a JSON object with a name and arguments, or arguments alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = frozenset({"name", "arguments", "type", "id", "index"})
"""Some models put more beside the name and the arguments, which says nothing."""


_SURROGATES = re.compile("[\ud800-\udfff]")


class CallReader:
    """Reads from the opening brace on; `push` until `ended` or `failed`.

    An object that begins with other keys, without the name of a tool, or with arguments that are no object, is no call:
    `failed`.
    """

    def __init__(self, names: Container[str]) -> None:
        """`names` are those of the tools."""
        self.ended = False
        self.failed = False
        self.name: str | None = None
        self.is_started = False
        """Whether name and opening brace of the arguments are there: from now on, arguments are passed on."""
        self.is_complete = False
        """Whether all arguments are there."""
        self._names = names
        self._held: list[str] = []
        self._arguments: list[str] = []
        self._scanner = JsonScanner()
        self._raw: list[str] = []
        self._key = ""
        self._keys_seen: set[str] = set()
        self._has_arguments = False
        self._step: Callable[[str, int], int] = self._brace

    @classmethod
    def of_arguments(cls, name: str) -> CallReader:
        """Read an object that is the arguments of the tool `name`."""
        reader = cls({name})
        reader.name = name
        reader._begin_value("arguments")
        return reader

    @property
    def held(self) -> str:
        """All of the text so far, while the call has not started."""
        return "".join(self._held)

    def push(self, text: str, start: int = 0) -> tuple[int, str]:
        """Take text from `start`; return where it stopped, and the arguments that can be passed on."""
        begin = start
        while start < len(text) and not (self.ended or self.failed):
            start = self._step(text, start)
        if not self.is_started:
            self._held.append(text[begin:start])
            return start, ""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return start, arguments

    def _brace(self, text: str, start: int) -> int:
        if text[start] != "{":
            return self._fail(start)
        self._step = self._first
        return start + 1

    def _first(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] == "}":
            return self._fail(start)
        self._step = self._before_key
        return start

    def _before_key(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] != '"':
            return self._fail(start)
        self._scan_next(self._in_key)
        return start

    def _in_key(self, text: str, start: int) -> int:
        start = self._scan(text, start)
        if self._scanner.ended:
            self._key = json.loads("".join(self._raw))
            if self._key in _ARGUMENTS:
                self._key = "arguments"
            if self.is_started:
                self._key = "ignored"
            elif self._key not in _KEYS or self._key in self._keys_seen:
                return self._fail(start)
            self._keys_seen.add(self._key)
            self._step = self._colon
        return start

    def _colon(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] != ":":
            return self._fail(start)
        self._begin_value(self._key)
        return start + 1

    def _begin_value(self, key: str) -> None:
        self._key = key
        self._step = self._before_value

    def _before_value(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        char = text[start]
        if (self._key == "name" and char != '"') or (
            self._key == "arguments" and char not in '{"n'
        ):
            return self._fail(start)
        if self._key == "arguments" and char == "{":
            self._has_arguments = True
            self.is_started = self.name is not None
            self._scan_next(self._in_arguments)
        else:
            self._scan_next(self._in_value)
        return start

    def _in_arguments(self, text: str, start: int) -> int:
        stop = self._scanner.push(text, start)
        self.failed = self._scanner.failed
        self._arguments.append(text[start:stop])
        if self._scanner.ended:
            self._end_arguments()
        return stop

    def _in_value(self, text: str, start: int) -> int:
        start = self._scan(text, start)
        if not self._scanner.ended:
            return start
        self._step = self._next
        if self._key == "name":
            self.name = json.loads("".join(self._raw))
            if self.name not in self._names:
                return self._fail(start)
            self.is_started = self._has_arguments
        elif self._key == "arguments":
            arguments = _object_in("".join(self._raw))
            if arguments is None:
                return self._fail(start)
            self._whole_arguments(arguments)
        return start

    def _whole_arguments(self, arguments: str) -> None:
        self._arguments.append(arguments)
        self._has_arguments = True
        self.is_started = self.name is not None
        self._end_arguments()

    def _end_arguments(self) -> None:
        self.is_complete = True
        self._step = self._next
        self.ended = not self._keys_seen

    def _next(self, text: str, start: int) -> int:
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] == ",":
            self._step = self._before_key
            return start + 1
        if text[start] != "}" or self.name is None:
            return self._fail(start)
        if not self._has_arguments:
            self._whole_arguments("{}")
        self.ended = True
        return start + 1

    def _scan_next(self, step: Callable[[str, int], int]) -> None:
        self._scanner = JsonScanner()
        self._raw.clear()
        self._step = step

    def _scan(self, text: str, start: int) -> int:
        stop = self._scanner.push(text, start)
        self._raw.append(text[start:stop])
        self.failed = self._scanner.failed
        return stop

    def _fail(self, start: int) -> int:
        self.failed = True
        return start


def _object_in(value: str) -> str | None:
    """Text of an object that is written as JSON text in a string, or left out as null."""
    inner = json.loads(value)
    if inner is None:
        return "{}"
    scanner = JsonScanner()
    inner = inner.strip()
    is_object = inner[:1] == "{" and scanner.push(inner) == len(inner) and scanner.ended
    # Half of a surrogate pair is valid in JSON, and can be sent to nobody.
    return inner if is_object and not _SURROGATES.search(inner) else None


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
"""Which part of a number follows which, by the next character."""
_WHOLE_NUMBERS = frozenset({"0", "int", "fraction", "exponent"})


class JsonScanner:
    """Follows one value of RFC 8259 from its first character on; `push` until `ended` or `failed`."""

    def __init__(self) -> None:
        self.ended = False
        self.failed = False
        self._open: list[str] = []
        """Brackets that wait for their end."""
        self._is_key = False
        self._rest = ""
        """What is missing of a literal, or a number's part."""
        self._num_hex = 0
        self._step: Callable[[str, int], int] = self._value

    def push(self, text: str, start: int = 0) -> int:
        """Take text from `start`; return where it stopped: behind the value, or at what cannot follow."""
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
        """What may follow an opening bracket."""
        start = behind_blanks(text, start)
        if start == len(text):
            return start
        if text[start] == _CLOSERS[self._open[-1]]:
            return self._close(start)
        self._step = self._item
        return start

    def _item(self, text: str, start: int) -> int:
        """A member's name, or a value of an array, after blanks."""
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
        start = _PLAIN.match(text, start).end()  # type: ignore[union-attr]  # it matches nothing as well
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
        """What may follow a value in its container."""
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
    """Position of the first character from `start` on that is no white space of JSON's."""
    return _BLANKS.match(text, start).end()  # type: ignore[union-attr]  # it matches nothing as well
