"""OpenAI's request for a response in the words of its chat, which is what templates and tools are written for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace_router.api.responses.input import (
    ForeignItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    ItemReference,
    MessageItem,
)
from millrace_router.api.responses.request import (
    AllowedFunctions,
    NamedFunction,
    ResponsesRequest,
    ResponsesText,
    ResponsesTool,
    SchemaTextFormat,
)
from millrace_router.errors import ValidationError
from millrace_router.request.grammar import ResponseFormat

SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "top_k",
    "min_p",
    "ignore_eos",
    "min_tokens",
    "priority",
    "chat_template_kwargs",
    "parallel_tool_calls",
)
"""Fields that a chat has by the same name."""


def chat_body(body: ResponsesRequest) -> dict[str, Any]:
    """Translate what has been checked; raises ValidationError."""
    return {
        **{name: getattr(body, name) for name in SAME},
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _choice(body.tool_choice),
        "response_format": _response_format(body.text),
        # Whoever spoke last, the answer is a turn of its own.
        "continue_final_message": False,
    }


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages = _turns(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise ValidationError("`input` has no message in it")
    return messages


def _turns(items: Iterable[InputItem]) -> list[dict[str, Any]]:
    """Turns of a chat: calls that follow what the assistant said, or one another, belong to one turn."""
    turns: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem():
                turns.append({"role": item.role, "content": item.content})
            case FunctionCallItem():
                _assistant_turn(turns).setdefault("tool_calls", []).append(_call(item))
            case FunctionCallOutputItem():
                turns.append({"role": "tool", "content": item.output, "tool_call_id": item.call_id})
            case ItemReference():
                raise ValidationError(
                    "items of type `item_reference` are not supported: nothing is stored here, "
                    "so send the item itself"
                )
            case ForeignItem():
                raise ValidationError(
                    f"`input` has an item of type `{item.type[:40]}`, which is not supported"
                )
    return turns


def _assistant_turn(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The turn that a call belongs to: the last one, or a new one."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": None})
    return turns[-1]


def _call(item: FunctionCallItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _choice(choice: str | NamedFunction | AllowedFunctions | None) -> object:
    match choice:
        case NamedFunction():
            return _named(choice)
        case AllowedFunctions():
            tools = [_named(function) for function in choice.tools]
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": choice.mode, "tools": tools},
            }
    return choice


def _response_format(text: ResponsesText | None) -> ResponseFormat | dict[str, Any] | None:
    given = None if text is None else text.format
    if not isinstance(given, SchemaTextFormat):
        return given
    schema = {"name": given.name, "schema": given.schema_, "strict": given.strict}
    return {"type": "json_schema", "json_schema": schema}
