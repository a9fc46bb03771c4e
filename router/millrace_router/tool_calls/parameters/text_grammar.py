"""Grammars of strings that a format writes as they are, up to a text that ends them."""

from __future__ import annotations

import re
from typing import Any

from millrace_router.errors import ToolError
from millrace_router.tool_calls.lark import ANY, escaped, pattern

_KNOWN = frozenset({"type", "enum", "const", "pattern", "minLength", "maxLength"})
_NOT_PLAIN = re.compile(r"\(\?<?[=!]|\\[1-9kbBAzZ]|\|")


def text_terminal(schema: dict[str, Any], end: str, mark: str, *, strict: bool) -> str:
    """The terminal of any string that `schema` allows and `end`; the string does not contain `mark`.

    `end` is empty or ends with `mark`, or with no part of it where `mark` is a token of its own.

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
    wanted = [pattern(f"{content}{escaped(end)}") for content in contents]
    behind = "(?s:.+)" if end.endswith(mark) else ANY
    return " & ".join([*wanted, f"~{pattern(f'{ANY}{escaped(mark)}{behind}')}"])


def _searched(expression: str, *, strict: bool) -> list[str]:
    """The expression of a text in which `expression` is found; none if it cannot be written so, unless `strict`."""
    begins, ends = expression.startswith("^"), expression.endswith("$")
    inner = expression[begins : len(expression) - ends]
    if _NOT_PLAIN.search(expression) and (begins or ends or "|" not in expression):
        if strict:
            raise ToolError(f"this model's format cannot keep the pattern `{expression[:100]}`")
        return []
    return [f"{'' if begins else ANY}(?:{inner}){'' if ends else ANY}"]
