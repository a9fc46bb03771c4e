"""Reads one call from text that arrives in pieces: a JSON object with name and arguments, or only arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Container

from millrace_router.tool_calls.parsing.json_mender import JsonMender, mended, spaced

_ARGUMENTS = frozenset({"arguments", "parameters"})
_TOOL_NAME = "tool_name"
"""Cohere's key of the name."""
_QUOTES = "\"'"
_KEYS = frozenset({"name", "arguments", "type", "id", "index", "tool_call_id"})
"""Keys that models write; all but the name and the arguments are ignored."""


class CallReader:
    """Reads from the opening brace on; `push` until `ended` or `failed`.

    It fails if the object begins with other keys, lacks a tool's name, or has arguments that are not an object.
    """

    def __init__(self, names: Container[str]) -> None:
        """`names` are the names of the tools."""
        self.ended = False
        self.failed = False
        self.name: str | None = None
        self.is_started = False
        """Whether the name and the opening brace of the arguments were read; from then on, arguments are returned."""
        self.is_complete = False
        """Whether all arguments were read."""
        self._names = names
        self._held: list[str] = []
        self._arguments: list[str] = []
        self._mender = JsonMender()
        self._value_parts: list[str] = []
        self._key = ""
        self._keys_seen: set[str] = set()
        self._has_arguments = False
        self._step: Callable[[str, int], int] = self._brace

    @classmethod
    def of_arguments(cls, name: str) -> CallReader:
        """Make a reader of the arguments of the tool `name`, without an object around them."""
        reader = cls({name})
        reader.name = name
        reader._begin_value("arguments")
        return reader

    @property
    def held(self) -> str:
        """All text so far, while the call has not started."""
        return "".join(self._held)

    @property
    def undecided(self) -> str:
        """Text of the arguments that was read, and is not among those that were returned."""
        return "" if self.is_complete else self._mender.held

    def push(self, text: str, start: int = 0) -> tuple[int, str]:
        """Read text from `start` on; return where reading stopped, and new text of the arguments."""
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

    @spaced
    def _first(self, text: str, start: int) -> int:
        if text[start] == "}":
            return self._fail(start)
        self._step = self._before_key
        return start

    @spaced
    def _before_key(self, text: str, start: int) -> int:
        if text[start] not in _QUOTES:
            return self._fail(start)
        self._scan_next(self._in_key)
        return start

    def _in_key(self, text: str, start: int) -> int:
        start = self._scan(text, start)
        if self._mender.ended:
            self._key = json.loads("".join(self._value_parts))
            if self._key in _ARGUMENTS:
                self._key = "arguments"
            elif self._key == _TOOL_NAME:
                self._key = "name"
            if self.is_started:
                self._key = "ignored"
            elif self._key not in _KEYS or self._key in self._keys_seen:
                return self._fail(start)
            self._keys_seen.add(self._key)
            self._step = self._colon
        return start

    @spaced
    def _colon(self, text: str, start: int) -> int:
        if text[start] != ":":
            return self._fail(start)
        self._begin_value(self._key)
        return start + 1

    def _begin_value(self, key: str) -> None:
        self._key = key
        self._step = self._before_value

    @spaced
    def _before_value(self, text: str, start: int) -> int:
        char = text[start]
        if (self._key == "name" and char not in _QUOTES) or (
            self._key == "arguments" and char not in f"{{{_QUOTES}nN"
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
        stop, arguments = self._mender.push(text, start)
        self.failed = self._mender.failed
        self._arguments.append(arguments)
        if self._mender.ended:
            self._end_arguments()
        return stop

    def _in_value(self, text: str, start: int) -> int:
        start = self._scan(text, start)
        if not self._mender.ended:
            return start
        self._step = self._next
        if self._key == "name":
            self.name = json.loads("".join(self._value_parts))
            if self.name not in self._names:
                return self._fail(start)
            self.is_started = self._has_arguments
        elif self._key == "arguments":
            arguments = _object_in("".join(self._value_parts))
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

    @spaced
    def _next(self, text: str, start: int) -> int:
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
        self._mender = JsonMender()
        self._value_parts.clear()
        self._step = step

    def _scan(self, text: str, start: int) -> int:
        stop, value = self._mender.push(text, start)
        self._value_parts.append(value)
        self.failed = self._mender.failed
        return stop

    def _fail(self, start: int) -> int:
        self.failed = True
        return start


def _object_in(value: str) -> str | None:
    """Return the text of an object in a JSON string; `{}` for null, None for any other value."""
    inner = json.loads(value)
    if inner is None:
        return "{}"
    inner = inner.strip()
    return mended(inner) if inner[:1] == "{" else None
