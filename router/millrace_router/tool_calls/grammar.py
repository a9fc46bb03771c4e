"""What a model with tools may say: calls, and perhaps answers in a format besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.arguments_schema import SPACING
from millrace_router.tool_calls.lark import json_value
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.tool_calls.tool_format import ToolFormat


def chat_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], choice: ToolChoice, answer: Grammar | None
) -> Grammar | None:
    """Return what the whole of it has to match, None if that is any text; raises as `ToolFormat.grammar`.

    `answer` is the schema of what may be said instead of calls, None for any text.
    """
    if answer is None:
        return tool_format.grammar(tools, choice)
    calls = tool_format.grammar(tools, replace(choice, kind="required"))
    assert calls is not None
    return calls_or_answer(calls, answer.source)


_START = "start: "


def calls_or_answer(calls: Grammar, schema: str) -> Grammar:
    """Return what either `calls` match, a grammar of a `ToolFormat`, or JSON that matches the text of a schema."""
    assert calls.source.startswith(_START)
    answer = json_value({**orjson.loads(schema), "x-guidance": SPACING})
    rules = calls.source.removeprefix(_START)
    return Grammar(GrammarKind.LARK, f"{_START}calls | answer\nanswer: {answer}\ncalls: {rules}")
