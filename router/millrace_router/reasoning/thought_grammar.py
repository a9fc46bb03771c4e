"""Pieces of Lark for thoughts before an answer, in which a budget closes the thought.

Within a thought every token counts, whatever its bytes: `<[^1,2]>` is any token but these. No end of sequence is among
them, because an answer follows, and because a matcher cannot take one back when a draft with it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NoReturn

import orjson

from millrace_router.errors import ValidationError
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.parsing.lark import ANY, escaped, json_value, literal, pattern

ANY_TOKENS = "<[*]>*"


def written(text: str, ids: Mapping[str, int]) -> str:
    """Return the rule of `text`, in which the texts of `ids` are tokens."""
    if text in ids:
        return token(ids[text])
    inner = max((one for one in ids if one in text), key=len, default=None)
    if inner is None:
        return literal(text)
    before, _, after = text.partition(inner)
    parts = (written(part, ids) for part in (before, inner, after) if part)
    return " ".join(parts)


def token(id_: int) -> str:
    return f"<[{id_}]>"


def none_of(ids: Iterable[int]) -> str:
    """Return the rule of a token that is none of `ids`."""
    return f"<[^{','.join(map(str, sorted(set(ids))))}]>"


def tokens_up_to(closer: int, ends: Iterable[int], budget: int | None) -> str:
    """Return the rule of a thought's tokens, at most `budget`, before the token `closer`."""
    if budget == 0:
        return ""
    return none_of([closer, *ends]) + ("*" if budget is None else f"{{0,{budget}}}")


def text_up_to(closers: Collection[str]) -> str:
    """Return the rule of any text up to and including the first of `closers`."""
    text = f"{ANY}(?:{'|'.join(map(escaped, closers))})"
    return f"{pattern(text)} & ~{pattern(f'{text}(?s:.+)')}"


def answer_rule(grammar: Grammar) -> str:
    """Return the rule of an answer that matches `grammar`."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return json_value(orjson.loads(grammar.source))
        case GrammarKind.REGEX:
            return pattern(grammar.source)
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.source}\n}}"


def no_budget() -> NoReturn:
    """Raise ValidationError."""
    raise ValidationError("thinking budgets need tags that are single tokens; this model's are not")
