"""A grammar for whoever gives both tools and a response format: the model calls, or answers in that format."""

from __future__ import annotations

import orjson

from millrace_router.request import Grammar, GrammarKind
from millrace_router.tools.arguments_schema import SPACING
from millrace_router.tools.lark import json_value

_START = "start: "


def calls_or_answer(calls: Grammar, schema: str) -> Grammar:
    """Return what either `calls` match, a grammar of a `ToolFormat`, or JSON that matches the text of a schema."""
    assert calls.source.startswith(_START)
    answer = json_value({**orjson.loads(schema), "x-guidance": SPACING})
    rules = calls.source.removeprefix(_START)
    return Grammar(GrammarKind.LARK, f"{_START}calls | answer\nanswer: {answer}\ncalls: {rules}")
