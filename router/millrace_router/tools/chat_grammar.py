"""What a model with tools may say: calls, and perhaps answers in a format besides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson

from millrace_router.request import Grammar
from millrace_router.tools.calls_or_answer import calls_or_answer
from millrace_router.tools.tool import Tool, ToolChoice
from millrace_router.tools.tool_format import ToolFormat


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


def chat_grammar_from(
    tool_format: ToolFormat, tools: bytes, choice: ToolChoice, answer: Grammar | None
) -> Grammar | None:
    """Do as `chat_grammar` with tools that orjson has made JSON of."""
    return chat_grammar(tool_format, [Tool(**one) for one in orjson.loads(tools)], choice, answer)
