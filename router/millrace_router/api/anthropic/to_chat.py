"""Anthropic's request in the words of OpenAI's chat, which is what templates and tools are written for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import orjson

from millrace_router.api.anthropic.request import (
    Block,
    CountTokensRequest,
    MessagesRequest,
    MessagesTool,
    MessagesToolChoice,
    MessagesTurn,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from millrace_router.errors import ValidationError

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ID_PREFIX = "toolu_"
"""What ids of calls begin with for Anthropic's clients; templates that want ids of a length do not expect it."""
ERROR = "Error"
"""What the result of a call that failed begins with: templates know no other way to say so."""


def chat_body(body: CountTokensRequest) -> dict[str, Any]:
    """Translate; raises ValidationError for calls at the end, which lack their results."""
    return {**_prompt(body), **_parameters(body)}


def tool_use_id(call_id: str) -> str:
    """Name a call as Anthropic does."""
    return ID_PREFIX + call_id.removeprefix("call_")


def call_id(tool_use_id: str) -> str:
    """Name a call as the model's template is to know it."""
    return tool_use_id.removeprefix(ID_PREFIX)


def _prompt(body: CountTokensRequest) -> dict[str, Any]:
    last = body.messages[-1].content
    if any(isinstance(block, ToolUseBlock) for block in last):
        raise ValidationError("`tool_use` at the end of `messages` has no `tool_result` after it")
    messages = list(_turns(body.messages))
    if body.system:
        messages.insert(0, {"role": "system", "content": _joined(body.system)})
    return {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        **_choice(body.tool_choice),
        "chat_template_kwargs": body.thinking and {"enable_thinking": False},
    }


def _parameters(body: CountTokensRequest) -> dict[str, Any]:
    if not isinstance(body, MessagesRequest):
        return {}
    output = body.output_config.format if body.output_config else None
    schema = {"name": "output", "schema": output.schema_, "strict": True} if output else None
    return {
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": None if body.top_p == 1 else body.top_p,
        "top_k": body.top_k,
        "response_format": schema and {"type": "json_schema", "json_schema": schema},
    }


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _choice(choice: MessagesToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tool_choice": CHOICES.get(choice.type, named),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _turns(turns: Sequence[MessagesTurn]) -> Iterator[dict[str, Any]]:
    """Turns of one role that follow one another become one, as Anthropic has it."""
    names: dict[str, str] = {}
    for role, group in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.content]
        if role == "assistant":
            calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
            names |= {call.id: call.name for call in calls}
            yield _assistant(blocks, calls)
        else:
            yield from _others(role, blocks, names)


def _assistant(blocks: Sequence[Block], calls: Sequence[ToolUseBlock]) -> dict[str, Any]:
    text = _joined(blocks)
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": list(map(_call, calls))}


def _call(call: ToolUseBlock) -> dict[str, Any]:
    arguments = orjson.dumps(call.input).decode()
    return {
        "id": call_id(call.id),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _others(role: str, blocks: Sequence[Block], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Results become messages of their own, where they stand; the text between them stays `role`'s."""
    if not blocks:
        yield {"role": role, "content": ""}
    for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            yield {"role": role, "content": _joined(group)}
            continue
        for block in group:
            assert isinstance(block, ToolResultBlock)
            yield {
                "role": "tool",
                "tool_call_id": call_id(block.tool_use_id),
                "name": names.get(block.tool_use_id),
                "content": _result(block),
            }


def _result(block: ToolResultBlock) -> str:
    text = _joined(block.content or ())
    if not block.is_error:
        return text
    return f"{ERROR}: {text}" if text else ERROR


def _joined(blocks: Iterable[Block]) -> str:
    """Texts of one turn, each on a line of its own; what was thought is left out."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
