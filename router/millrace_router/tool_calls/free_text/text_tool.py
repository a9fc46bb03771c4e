"""Tools whose input is a text: the model writes it as the one parameter of a function."""

from __future__ import annotations

from typing import Any

import orjson

from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.tool import Tool

PARAMETER = "input"
"""Name of the parameter."""


def text_tool(name: str, description: str | None, grammar: Grammar | None) -> Tool:
    """Return the function of a tool whose input matches `grammar`, or is any text."""
    text: dict[str, Any] = {"type": "string"}
    if grammar is not None:
        kind = "regular expression" if grammar.kind is GrammarKind.REGEX else "grammar"
        text["description"] = f"A text that matches this {kind}:\n{grammar.source}"
    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {PARAMETER: text},
            "required": [PARAMETER],
            "additionalProperties": False,
        },
        # Without a grammar, the input is the arguments' one text if it can be read, and whatever else they are if not.
        strict=grammar is not None,
        text=grammar,
    )


def arguments_of(text: str) -> str:
    """Return the arguments of a call with the input `text`."""
    return orjson.dumps({PARAMETER: text}).decode()
