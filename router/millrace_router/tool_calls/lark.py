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


def literal(text: str) -> str:
    """The rule of exactly `text`."""
    return _escape_brackets(json.dumps(text))


def token_or_literal(text: str, special_ids: Mapping[str, int]) -> str:
    """The rule of the special token with this text, else of the text."""
    return literal(text) if text not in special_ids else f"<[{special_ids[text]}]>"


def json_value(schema: Mapping[str, Any]) -> str:
    """The rule of JSON that matches `schema`."""
    parts = _STRING.split(json.dumps(schema))
    # All strings at once, since there may be many. JSON escapes newlines, so none is inside a string.
    parts[1::2] = _escape_brackets("\n".join(parts[1::2])).split("\n")
    return "%json " + "".join(parts)


def matching(expression: str, *, without: Iterable[str] = ()) -> str:
    """The rule of text that matches an expression and contains none of `without`."""
    return " & ".join(
        [_pattern(expression), *(f"~{_pattern(f'{ANY}{_escaped(text)}{ANY}')}" for text in without)]
    )


def up_to(text: str) -> str:
    """The rule of any text up to and including the first `text`."""
    end = _escaped(text)
    return f"{_pattern(f'{ANY}{end}')} & ~{_pattern(f'{ANY}{end}(?s:.+)')}"


def _escape_brackets(text: str) -> str:
    for bracket in "()[]{}":
        text = text.replace(bracket, f"\\u{ord(bracket):04x}")
    return text


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n")


def _pattern(expression: str) -> str:
    return "/" + expression.replace("/", "\\/") + "/"
