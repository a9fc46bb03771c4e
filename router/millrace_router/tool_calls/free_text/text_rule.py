"""The rule of the input of a text tool, for the grammars of calls.

The input and its end are one terminal: a terminal that ends within an escape, or within the mark behind the input,
would be told too late from the next one. Only a grammar whose rules refer to themselves cannot be a terminal.
"""

from __future__ import annotations

import json
from graphlib import CycleError, TopologicalSorter

from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.free_text.lark_source import (
    Expression,
    LarkSource,
    Literal,
    Part,
    Reference,
    unsupported,
)
from millrace_router.tool_calls.free_text.regex_quoting import RegexQuoter, unanchored
from millrace_router.tool_calls.free_text.text_tool import PARAMETER
from millrace_router.tool_calls.lark import ANY, escaped, literal, pattern


def quoted_rule(text: Grammar) -> str:
    """The rule of the input inside a JSON string, and the quote behind it; raises ToolError if there is none."""
    return _rule(text, end='"', mark="", is_quoted=True)


def plain_rule(text: Grammar, end: str, mark: str) -> str:
    """The rule of the input as it is and `end`, where the input does not contain `mark`; raises ToolError.

    `end` is empty or ends with `mark`, or with no part of it where `mark` is a token of its own.
    """
    return _rule(text, end=end, mark=mark, is_quoted=False)


def arguments_rule(text_rule: str) -> str:
    """The rule of all arguments as JSON; `text_rule` is the name of the quoted rule."""
    before = "{", f'"{PARAMETER}"', ": ", '"'
    return " ".join((*map(literal, before), text_rule, literal("}")))


def _rule(text: Grammar, *, end: str, mark: str, is_quoted: bool) -> str:
    """The rule, whose terminals are in a grammar of their own, so that names may be anything."""
    if text.kind is GrammarKind.REGEX:
        source = LarkSource({"start": [Expression(text.source)]})
    else:
        source = LarkSource.of(text.source)
    names = {name: f"PART_{index}" for index, name in enumerate(source.definitions)}
    try:
        order = list(
            TopologicalSorter({name: source.references(name) for name in names}).static_order()
        )
    except CycleError as error:
        raise unsupported(f"the rule `{error.args[1][0][:40]}` within itself") from None
    lines = [
        f"{names[name]}: {_written(source.definitions[name], names, is_quoted=is_quoted)}"
        for name in order
    ]
    whole = f"({names['start']} {literal(end)})" if end else names["start"]
    if mark:
        behind = "(?s:.+)" if end.endswith(mark) else ANY
        whole += f" & ~{pattern(f'{ANY}{escaped(mark)}{behind}')}"
    return "%lark {\n" + "\n".join(("start: TEXT", f"TEXT: {whole}", *lines)) + "\n}"


def _written(parts: list[Part], names: dict[str, str], *, is_quoted: bool) -> str:
    return " ".join(_part(part, names, is_quoted=is_quoted) for part in parts)


def _part(part: Part, names: dict[str, str], *, is_quoted: bool) -> str:
    match part:
        case Reference(name):
            return names[name]
        case Literal(plain, False):
            inside = json.dumps(plain, ensure_ascii=False)[1:-1] if is_quoted else plain
            return literal(inside)
        case Literal(plain, _):
            return _expression(escaped(plain), "i", is_quoted=is_quoted) if plain else '""'
        case Expression(source, flags):
            return _expression(source, flags, is_quoted=is_quoted)
        case operator:
            return operator


def _expression(source: str, flags: str, *, is_quoted: bool) -> str:
    whole = unanchored(source)
    return pattern(RegexQuoter(whole, flags=flags).quoted() if is_quoted else whole) + flags
