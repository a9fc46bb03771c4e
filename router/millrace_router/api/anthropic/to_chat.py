"""Makes a chat of Anthropic's request for a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from millrace_router.api.anthropic.request import (
    Block,
    CompactionBlock,
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    MessagesTurn,
    TextBlock,
    ThinkingBlock,
    ThinkingConfig,
    ToolResultBlock,
    ToolUseBlock,
    joined,
)
from millrace_router.api.body.grammars import raw_schema
from millrace_router.api.body.messages import (
    called,
    check_exclusive,
    choose_by_word,
    choose_named,
    new_tool,
)
from millrace_router.api.body.sampling import openai_generation
from millrace_router.api.chat.chat import Chat
from millrace_router.errors import ThreadsUnsupported, ValidationError
from millrace_router.reasoning.reasoning_format import switch
from millrace_router.request.generation_request import FieldNames, GenerationRequest
from millrace_router.request.images import ImageSource
from millrace_router.request.limits import Dialect
from millrace_router.text.template_messages import THOUGHT, Message, image_part
from millrace_router.tool_calls.tool import Tool, ToolChoice

NAMES = FieldNames(prompt="messages", max_new_tokens="max_tokens", stop="stop_sequences")
ID_PREFIX = "toolu_"
"""Prefix of the ids of calls for Anthropic's clients; templates that want ids of a length do not expect it."""
ERROR = "Error"
"""Beginning of the result of a call that failed: templates lack a field for it."""


def chat_of(body: CountTokensRequest, dialect: Dialect) -> Chat:
    """Translate.

    Raises:
        ThreadsUnsupported: the conversation is not all here.
        ValidationError: there are calls at its end, which lack their results.
        ToolError: a tool that is to be called is missing.

    """
    if body.thread is not None:
        raise ThreadsUnsupported
    body.check_last_turn(dialect)
    last = body.messages[-1].content
    if any(isinstance(block, ToolUseBlock) for block in last):
        raise ValidationError("`tool_use` at the end of `messages` has no `tool_result` after it")
    images = dict(_images(body.messages)) if dialect.reads_images else {}
    messages = list(_turns(_since_compaction(body.messages), images))
    if body.instructions:
        messages.insert(0, {"role": "system", "content": joined(body.instructions)})
    request = _generation(body, dialect)
    check_exclusive(body.offered or None, request, dialect)
    tools, choice = _tools(body)
    return Chat(
        request=request,
        messages=messages,
        tools=tools,
        choice=choice,
        template_variables=_switched(body.thinking),
        effort=None if body.output_config is None else body.output_config.effort,
        thinking_budget=None if body.thinking is None else body.thinking.budget_tokens,
        shows_thought=body.thinking is None or body.thinking.display != "omitted",
    )


def _switched(thinking: ThinkingConfig | None) -> dict[str, bool] | None:
    if thinking is None or thinking.type in {"adaptive", "between_tools"}:
        return None
    return switch(thinks=thinking.type == "enabled")


def tool_use_id(call_id: str) -> str:
    """Name a call as Anthropic does."""
    return ID_PREFIX + call_id.removeprefix("call_")


def call_id(tool_use_id: str) -> str:
    """Name a call as the model's template is to know it."""
    return tool_use_id.removeprefix(ID_PREFIX)


def _generation(body: CountTokensRequest, dialect: Dialect) -> GenerationRequest:
    if not isinstance(body, MessagesRequest):
        return GenerationRequest(names=NAMES)
    output = body.output_config.format if body.output_config else None
    request = GenerationRequest(
        max_new_tokens=body.max_tokens,
        stop=tuple(stop for stop in body.stop_sequences or () if stop),
        temperature=body.temperature,
        top_p=None if body.top_p == 1 and dialect.refuses_full_top_p else body.top_p,
        top_k=body.top_k,
        grammar=None if output is None else raw_schema(output.schema_),
        names=NAMES,
    )
    return openai_generation(request, dialect)


def _tools(body: CountTokensRequest) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = tuple(
        new_tool(tool.name, tool.description, tool.input_schema, strict=tool.strict)
        for tool in body.offered
    )
    choice = body.tool_choice
    if choice is None:
        return tools, ToolChoice("auto")
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "tool":
        return choose_named(tools, choice.name or "", parallel=parallel)
    word = "required" if choice.type == "any" else choice.type
    return choose_by_word(tools, word, parallel=parallel)


def _since_compaction(turns: Sequence[MessagesTurn]) -> Sequence[MessagesTurn]:
    """Return the turns with the last summary of earlier ones in their place, as a turn of the user."""
    for number in reversed(range(len(turns))):
        blocks = turns[number].content
        for index in reversed(range(len(blocks))):
            block = blocks[index]
            if isinstance(block, CompactionBlock) and block.content is not None:
                summary = MessagesTurn(
                    role="user", content=[TextBlock(type="text", text=block.content)]
                )
                rest = turns[number].model_copy(update={"content": blocks[index + 1 :]})
                return [summary, *([rest] if rest.content else []), *turns[number + 1 :]]
    return turns


Images = Mapping[int, ImageSource]
"""Sources of pictures by the `id` of their block."""


def _images(turns: Sequence[MessagesTurn]) -> Iterator[tuple[int, ImageSource]]:
    for number, turn in enumerate(turns):
        for index, block in enumerate(turn.content):
            part = f"messages.{number}.content.{index}"
            if isinstance(block, ImageBlock):
                yield id(block), block.image(part)
            elif isinstance(block, ToolResultBlock):
                for inner, one in enumerate(block.content or ()):
                    if isinstance(one, ImageBlock):
                        yield id(one), one.image(f"{part}.content.{inner}")


def _content(blocks: Iterable[object], images: Images) -> str | list[dict[str, Any]]:
    """Return the text of blocks, or their parts if there are pictures among them."""
    blocks = list(blocks)
    if not any(id(block) in images for block in blocks):
        return joined(blocks)
    parts: list[dict[str, Any]] = []
    for is_image, group in groupby(blocks, key=lambda block: id(block) in images):
        if is_image:
            parts += [image_part(images[id(block)]) for block in group]
        elif text := joined(group):
            parts.append({"type": "text", "text": text})
    return parts


def _turns(turns: Sequence[MessagesTurn], images: Images) -> Iterator[Message]:
    """Join successive turns of one role into one, as Anthropic does."""
    names: dict[str, str] = {}
    for role, group in groupby(turns, key=lambda turn: turn.role):
        blocks = [block for turn in group for block in turn.content]
        if role == "assistant":
            calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
            names |= {call.id: call.name for call in calls}
            yield _assistant(blocks, calls)
        else:
            yield from _others(role, blocks, names, images)


def _assistant(blocks: Sequence[Block], calls: Sequence[ToolUseBlock]) -> Message:
    text = joined(blocks)
    thought = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    thoughts = {THOUGHT: thought} if thought else {}
    if not calls:
        return {"role": "assistant", "content": text, **thoughts}
    made = [called(call_id(call.id), call.name, call.arguments) for call in calls]
    return {"role": "assistant", "content": text or None, "tool_calls": made, **thoughts}


def _others(
    role: str, blocks: Sequence[Block], names: dict[str, str], images: Images
) -> Iterator[Message]:
    """Make a message of each tool result, in order; the text between them stays in messages of `role`."""
    if not blocks:
        yield {"role": role, "content": ""}
    for is_result, group in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            yield {"role": role, "content": _content(group, images)}
            continue
        for block in group:
            assert isinstance(block, ToolResultBlock)
            id_, name = call_id(block.tool_use_id), names.get(block.tool_use_id)
            result = {"role": "tool", "content": _result(block, images), "tool_call_id": id_}
            yield result if name is None else {**result, "name": name}


def _result(block: ToolResultBlock, images: Images) -> str | list[dict[str, Any]]:
    content = _content(block.content or (), images)
    if not block.is_error:
        return content
    if isinstance(content, list):
        return [{"type": "text", "text": f"{ERROR}: "}, *content]
    return f"{ERROR}: {content}" if content else ERROR
