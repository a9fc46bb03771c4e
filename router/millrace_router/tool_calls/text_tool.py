"""Tools whose input is a text: the model writes it as the one parameter of a function."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.tool import Tool

PARAMETER = "input"
"""Name of the parameter."""


def text_tool(name: str, description: str | None, grammar: Grammar | None) -> Tool:
    """Return the function of a tool whose input matches `grammar`, or is any text."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        kind = "regular expression" if grammar.kind is GrammarKind.REGEX else "grammar"
        text["description"] = f"A text that matches this {kind}:\n{grammar.source}"
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {PARAMETER: text},
            "required": [PARAMETER],
            "additionalProperties": False,
        },
        # Without a grammar, the input is the arguments' one text if it can be read, and whatever else they are if not.
        strict=grammar is not None,
        text=grammar,
    )


def arguments_of(text: str) -> str:
    """Return the arguments of a call with the input `text`."""
    return orjson.dumps({PARAMETER: text}).decode()


_HEAD = re.compile(rf'\s*\{{\s*"{PARAMETER}"\s*:\s*"')
_COMPACT_HEAD = f'{{"{PARAMETER}":"'
_BLANKS = re.compile(r"\s+")
_CONTENTS = re.compile(r'(?:[^"\\]|\\(?:u[0-9a-fA-F]{4}|[^u]))*')
"""Whole characters of a JSON string."""
_HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})\Z")
"""At the end: the first half of a character, which waits for the second."""


class TextReader:
    """Decodes the string; arguments that are not an object with this one string are the input as they are.

    Where the arguments are cut, half a character or half an escape at their end is lost.
    """

    def __init__(self) -> None:
        self._held = ""
        """Arguments that are not decided yet."""
        self._in_text = False
        self._is_raw = False
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Take more arguments; return what they add to the input."""
        if self._has_ended:
            return ""
        self._held += arguments
        if not (self._in_text or self._is_raw):
            self._read_head()
        if self._is_raw:
            return self._all()
        return self._decoded() if self._in_text else ""

    def _read_head(self) -> None:
        if head := _HEAD.match(self._held):
            self._held = self._held[head.end() :]
            self._in_text = True
        elif not _COMPACT_HEAD.startswith(_BLANKS.sub("", self._held)):
            self._is_raw = True

    def _all(self) -> str:
        text, self._held = self._held, ""
        return text

    def _decoded(self) -> str:
        contents = _CONTENTS.match(self._held)
        assert contents is not None
        end = contents.end()
        self._has_ended = self._held[end : end + 1] == '"'
        text = contents[0]
        if not self._has_ended and (half := _HALF.search(text)):
            end, text = half.start(1), text[: half.start(1)]
        self._held = "" if self._has_ended else self._held[end:]
        return _text_of(text)


def _text_of(contents: str) -> str:
    """Decode the inside of a JSON string; unknown escapes stay as they are, and half a character is replaced."""
    try:
        text: str = json.loads(f'"{contents}"', strict=False)
    except json.JSONDecodeError:
        return contents
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
