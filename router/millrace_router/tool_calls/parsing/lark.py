"""Pieces of Lark in llguidance's variant, for grammars of tool calls.

Brackets inside strings are escaped, so that the remaining brackets show the depth of nesting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_STRING = re.compile(r'("(?:[^"\\]|\\.)*")')
ANY = "(?s:.*)"
BLANKS = r"[ \t\n\r]*"
_SLASH = re.compile(r"\\.|/", re.DOTALL)
"""An escaped character, which keeps its escape, or a slash, which would end a terminal."""


def literal(text: str) -> str:
    """Return the rule of exactly `text`."""
    return _escape_brackets(json.dumps(text))


def token_or_literal(text: str, special_ids: Mapping[str, int]) -> str:
    """Return the rule of the special token with this text, else of the text."""
    return literal(text) if text not in special_ids else f"<[{special_ids[text]}]>"


def json_value(schema: Mapping[str, Any]) -> str:
    """Return the rule of JSON that matches `schema`."""
    parts = _STRING.split(json.dumps(schema))
    # All strings at once, since there may be many. JSON escapes newlines, so none is inside a string.
    parts[1::2] = _escape_brackets("\n".join(parts[1::2])).split("\n")
    return "%json " + "".join(parts)


def matching(expression: str, *, without: Iterable[str] = ()) -> str:
    """Return the rule of text that matches an expression and contains none of `without`."""
    return " & ".join(
        [pattern(expression), *(f"~{pattern(f'{ANY}{escaped(text)}{ANY}')}" for text in without)]
    )


def up_to(text: str, *, without: Iterable[str] = ()) -> str:
    """Return the rule of any text up to and including the first `text`, with none of `without` in it."""
    end = escaped(text)
    first = f"{pattern(f'{ANY}{end}')} & ~{pattern(f'{ANY}{end}(?s:.+)')}"
    return " & ".join([first, *(f"~{pattern(f'{ANY}{escaped(one)}{ANY}')}" for one in without)])


def _escape_brackets(text: str) -> str:
    for bracket in "()[]{}":
        text = text.replace(bracket, f"\\u{ord(bracket):04x}")
    return text


def escaped(text: str) -> str:
    """Return the expression of exactly `text`."""
    return re.escape(text).replace("\\\n", "\\n")


def pattern(expression: str) -> str:
    closed = _SLASH.sub(lambda found: "\\/" if found[0] == "/" else found[0], expression)
    # A terminal is on one line.
    return "/" + closed.replace("\\\n", "\\n").replace("\n", "\\n") + "/"
