"""TGI's prompt about tools after the last message, for chat templates that do not render tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from millrace_router.errors import ToolError
from millrace_router.tool_calls.tool import Tool

Message = dict[str, Any]

DEFAULT_TOOL_PROMPT = (
    "\nGiven the functions available, please respond with a JSON for a function call with its proper arguments that"
    " best answers the given prompt. Respond in the format {name: function name, parameters: dictionary of argument"
    " name and its value}.Do not use variables.\n"
)
"""TGI's text, with its spelling."""


def prompt_for(call: str) -> str:
    """Return a prompt that requests calls in the form of `call`."""
    return (
        "\nIf one of these functions helps to answer the prompt above, respond with calls in exactly this format, where"
        f" the arguments are a JSON object:\n{call}\nOtherwise respond with text.\n"
    )


def with_tool_prompt(
    messages: Sequence[Message], tools: Sequence[Tool], prompt: str, *, lists_tools: bool
) -> list[Message]:
    """Return `messages` with the tools and `prompt` at the end of the last one.

    With `lists_tools`, the template renders the tools itself, and only `prompt` is added.

    Raises:
        ToolError: parameters are nested too deeply.

    """
    listed = "" if lists_tools else f"{_as_tgi(tools)}\n"
    *others, last = messages
    return [
        *others,
        {**last, "content": _with_text(last.get("content"), f"\n---\n{listed}{prompt}")},
    ]


def _with_text(content: object, text: str) -> object:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content or ''}{text}"


def _as_tgi(tools: Sequence[Tool]) -> str:
    """Write tools with TGI's field names and order; parameters are JSON text. Raises ToolError."""
    try:
        return orjson.dumps([_tool_as_tgi(tool) for tool in tools]).decode()
    except orjson.JSONEncodeError as error:
        raise ToolError(f"the tools cannot be written down: {error}") from error


def _tool_as_tgi(tool: Tool) -> dict[str, Any]:
    parameters = orjson.dumps(tool.parameters).decode()
    function = {"description": tool.description, "name": tool.name, "arguments": parameters}
    return {"type": "function", "function": function}
