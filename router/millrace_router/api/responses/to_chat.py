"""Makes a chat of OpenAI's request for a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from millrace_router.api.body.messages import (
    called,
    check_exclusive,
    choose_by_word,
    choose_named,
    note_of,
    only,
    template_content,
)
from millrace_router.api.body.sampling import TOP_LOGPROBS, openai_generation
from millrace_router.api.chat.chat import Chat
from millrace_router.api.responses.request import (
    CallOutputItem,
    ClientCallItem,
    ClientCallOutputItem,
    CustomToolCallItem,
    ForeignItem,
    FunctionCallItem,
    InputItem,
    ItemReference,
    McpCallItem,
    MessageItem,
    ReasoningItem,
    ResponsesAllowedTools,
    ResponsesNamedTool,
    ResponsesRequest,
)
from millrace_router.api.responses.tools import joined
from millrace_router.errors import StoreNeeded, ValidationError, quoted
from millrace_router.request.generation_request import FieldNames, GenerationRequest
from millrace_router.request.limits import Dialect
from millrace_router.text.template_messages import THOUGHT, Message
from millrace_router.tool_calls.text_tool import arguments_of
from millrace_router.tool_calls.tool import Tool, ToolChoice

NAMES = FieldNames(
    prompt="input",
    max_new_tokens="max_output_tokens",
    top_n_tokens="top_logprobs",
    least_tokens="min_tokens",
    most_tokens="max_output_tokens",
    truncate="truncate_prompt_tokens",
)


def chat_of(body: ResponsesRequest, dialect: Dialect) -> Chat:
    """Check, and translate; raises ValidationError, StoreNeeded or ToolError."""
    body.check()
    messages = _messages(body, dialect)
    request = _generation(body, dialect)
    check_exclusive(body.offered or None, request, dialect)
    tools, choice = _tools(body)
    return Chat(
        request=request,
        messages=messages,
        tools=tools,
        choice=choice,
        # The answer is a new turn, even after a turn of the assistant.
        continue_final_message=False,
        template_variables=body.chat_template_kwargs,
        thinking_budget=body.thinking_token_budget,
        effort=None if body.reasoning is None else body.reasoning.effort,
        output_options=body.output_options,
        num_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
    )


def _generation(body: ResponsesRequest, dialect: Dialect) -> GenerationRequest:
    text = None if body.text is None else body.text.format
    request = replace(
        body.sampling(dialect),
        max_new_tokens=body.max_output_tokens,
        grammar=None if text is None else text.raw(),
        top_n_tokens=body.top_logprobs if body.wants_logprobs else None,
        top_n_allowed=TOP_LOGPROBS,
        names=NAMES,
    )
    return openai_generation(request, dialect)


def _messages(body: ResponsesRequest, dialect: Dialect) -> list[Message]:
    messages = _turns(body.input, dialect)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise ValidationError("`input` has no message in it")
    return messages


def _turns(items: Sequence[InputItem], dialect: Dialect) -> list[Message]:
    """Return the turns of a chat; calls after the assistant's text, or after one another, belong to one turn."""
    turns: list[Message] = []
    for index, item in enumerate(items):
        match item:
            case MessageItem():
                content = template_content(
                    item.content,
                    dialect,
                    is_kept=item is not items[-1],
                    part=f"input.{index}.content",
                )
                _turn_of(turns, item.role).update(role=item.role, content=content)
            case ReasoningItem() if item.text:
                turns.append({"role": "assistant", "content": None, THOUGHT: item.text})
            case FunctionCallItem() | CustomToolCallItem() | ClientCallItem():
                _add_call(turns, item)
            case McpCallItem():
                _assistant_calls(turns).append(called(item.id, item.name, item.arguments))
                turns.append(_result(item.id, item.text))
            case CallOutputItem():
                output = template_content(
                    item.output, dialect, is_kept=True, part=f"input.{index}.output"
                )
                turns.append(_result(item.call_id, output))
            case ClientCallOutputItem():
                turns.append(_result(item.call_id or item.id or "", item.text))
            case ForeignItem():
                turns.append({"role": "user", "content": note_of(item.type)})
            case ItemReference():
                raise StoreNeeded(
                    f"`input` has a reference to the item {quoted(item.id)}, which is not stored here: "
                    "send the item itself"
                )
    return [turn for turn in turns if turn["content"] is not None or turn.get("tool_calls")]


def _add_call(
    turns: list[Message], item: FunctionCallItem | CustomToolCallItem | ClientCallItem
) -> None:
    """Add a call to the assistant's turn."""
    arguments: object
    if isinstance(item, ClientCallItem):
        name, arguments = item.name, item.arguments
    elif isinstance(item, FunctionCallItem):
        name, arguments = joined(item.namespace, item.name), item.arguments
    else:
        name, arguments = joined(item.namespace, item.name), arguments_of(item.input)
    _assistant_calls(turns).append(called(item.call_id, name, arguments))


def _result(call_id: str, content: object) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _turn_of(turns: list[Message], role: str) -> Message:
    """Return the turn of a message: the last one if that is so far only a thought of the assistant, or a new one."""
    last = turns[-1] if turns and role == "assistant" else {}
    if THOUGHT not in last or last["content"] is not None or "tool_calls" in last:
        turns.append({})
    return turns[-1]


def _assistant_calls(turns: list[Message]) -> list[object]:
    """Return the calls of the turn that a call belongs to."""
    calls: list[object] = _assistant_turn(turns).setdefault("tool_calls", [])
    return calls


def _assistant_turn(turns: list[Message]) -> Message:
    """Return the turn that a call belongs to: the last one, or a new one."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": None})
    return turns[-1]


def _tools(body: ResponsesRequest) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = tuple(tool.as_tool() for tool in body.offered)
    parallel = body.parallel_tool_calls is not False
    match body.tool_choice:
        case ResponsesNamedTool(namespace=namespace, name=name):
            return choose_named(tools, joined(namespace, name), parallel=parallel)
        case ResponsesAllowedTools(mode=mode, tools=named):
            names = [
                joined(one.namespace, one.name)
                for one in named
                if isinstance(one, ResponsesNamedTool)
            ]
            allowed = only(tools, names)
            return choose_by_word(allowed, mode, parallel=parallel)
        case word:
            return choose_by_word(tools, word or "auto", parallel=parallel)
