"""Values that a format writes as they are, without types: their JSON by the parameter's schema, and their grammars."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from millrace_router.errors import ToolError
from millrace_router.tool_calls.parsing.cursor import Cursor, Give, Wait
from millrace_router.tool_calls.parsing.expression_reader import literal_json
from millrace_router.tool_calls.parsing.json_mender import json_escaped, mended
from millrace_router.tool_calls.parsing.lark import ANY, escaped, pattern
from millrace_router.tool_calls.parsing.parameters import Kinds

_TEXT = frozenset({"string"})
_KINDS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
"""Types by the first character; the others begin numbers."""
_NULL = "null"
_BRACKETS = frozenset("([{")


def read_value(
    cursor: Cursor, kinds: Kinds, ends: Collection[str], give: Give, *, nexts: Collection[str] = ()
) -> Wait[bool]:
    """Pass the JSON of the text before an end on, and step over it; False if the answer ends before it.

    The end is one of `ends`, or of `nexts`, which are not stepped over. Text that can be nothing else than a string is
    passed on as it comes; other text is held until its end.
    """
    both = *ends, *nexts
    if kinds == _TEXT | {_NULL} and not (yield from _may_be_null(cursor, both)):
        kinds = _TEXT
    parts: list[str] = []
    is_text = kinds == _TEXT
    if is_text:
        give('"')
    add: Give = (lambda text: give(json_escaped(text))) if is_text else parts.append
    end = yield from cursor.copy(both, add)
    if not end:
        return False
    if end in nexts:
        cursor.position -= len(end)
    give('"' if is_text else json_of("".join(parts), kinds))
    return True


def json_of(text: str, kinds: Kinds) -> str:
    """Return the JSON of a whole value: what it reads as if that is of one of `kinds`, else a string."""
    stripped = text.strip()
    value = mended(stripped) or (literal_json(stripped) if stripped[:1] in _BRACKETS else None)
    if value is None and kinds is not None and "string" not in kinds:
        value = _word_or_number(stripped, kinds)
    if value:
        # Reading the value would fail for very long numbers and deep nesting.
        kind = _KINDS.get(value[0], "number")
        if kind != "string" and (kinds is None or kind in kinds or "string" not in kinds):
            return value
        if kind == "string" and kinds is not None and "string" not in kinds:
            return value
    return f'"{json_escaped(text)}"'


def _word_or_number(text: str, kinds: frozenset[str]) -> str | None:
    """Return the JSON of a word in any case, or of one of Python's numbers; None for another text."""
    word = text.lower()
    if (word in {"true", "false"} and "boolean" in kinds) or (word == _NULL and _NULL in kinds):
        return word
    if "number" not in kinds:
        return None
    with suppress(ValueError):
        return str(int(text))
    with suppress(ValueError):
        number = float(text)
        return repr(number) if math.isfinite(number) else None
    return None


def _may_be_null(cursor: Cursor, ends: Collection[str]) -> Wait[bool]:
    """Return whether null and an end follow, or the answer ends within them; the cursor stays where it is."""
    holds, cursor.holds = cursor.holds, True
    if not holds:
        cursor.drop()
    mark = cursor.position
    nulls = [f"{word}{end}" for word in (_NULL, "None") for end in ends]
    is_whole = bool((yield from cursor.take(nulls)))
    cursor.position, cursor.holds = mark, holds
    rest = cursor.text[mark:]
    return is_whole or any(null.startswith(rest) for null in nulls)


_KNOWN = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength"})
_NOT_PLAIN = re.compile(r"\(\?<?[=!]|\\[1-9kbBAzZ]|\|")


def text_terminal(schema: dict[str, Any], end: str, mark: str, *, strict: bool) -> str:
    """Return the terminal of any string that `schema` allows and `end`; the string does not contain `mark`.

    `end` is empty or ends with `mark`, or with no part of it where `mark` is a single token.

    Raises:
        ToolError: a keyword cannot be kept, and `strict`.

    """
    refused = sorted(schema.keys() - _KNOWN)
    if refused and strict:
        raise ToolError(f"this model's format cannot keep `{refused[0]}` of a string")
    contents = [ANY]
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        contents.append(f"(?s:.{{{least},{'' if most is None else most}}})")
    if isinstance(expression := schema.get("pattern"), str):
        contents += _searched(expression, strict=strict)
    expressions = [pattern(f"{content}{escaped(end)}") for content in contents]
    behind = "(?s:.+)" if end.endswith(mark) else ANY
    return " & ".join([*expressions, f"~{pattern(f'{ANY}{escaped(mark)}{behind}')}"])


def _searched(expression: str, *, strict: bool) -> list[str]:
    """The expression of a text in which `expression` is found; none if it cannot be written so, unless `strict`."""
    begins, ends = expression.startswith("^"), expression.endswith("$")
    inner = expression[begins : len(expression) - ends]
    if _NOT_PLAIN.search(expression) and (begins or ends or "|" not in expression):
        if strict:
            raise ToolError(f"this model's format cannot keep the pattern `{expression[:100]}`")
        return []
    return [f"{'' if begins else ANY}(?:{inner}){'' if ends else ANY}"]
