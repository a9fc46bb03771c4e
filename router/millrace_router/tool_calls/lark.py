"""Pieces of Lark in llguidance's variant, for grammars of tool calls.

Brackets inside strings are written as escapes, so that those that are left nest as deeply as they look.
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
    """Exactly `text`."""
    return _escape_brackets(json.dumps(text))


def token_or_literal(text: str, special_ids: Mapping[str, int]) -> str:
    """The special token of that text, or else the text itself."""
    return literal(text) if text not in special_ids else f"<[{special_ids[text]}]>"


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON that matches `schema`."""
    parts = _STRING.split(json.dumps(schema))
    # All strings at once, as there may be many; none has a newline, which JSON escapes.
    parts[1::2] = _escape_brackets("\n".join(parts[1::2])).split("\n")
    return "%json " + "".join(parts)


def matching(expression: str, *, without: Iterable[str] = ()) -> str:
    """Text that an expression matches, and that does not contain any of `without`."""
    return " & ".join(
        [_pattern(expression), *(f"~{_pattern(f'{ANY}{_escaped(text)}{ANY}')}" for text in without)]
    )


def up_to(text: str) -> str:
    """Anything up to the first place of `text`, and `text`."""
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
