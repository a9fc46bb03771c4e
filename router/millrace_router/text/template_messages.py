"""Converts messages in OpenAI's form to the form that a chat template expects."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Sequence
from typing import Any

import orjson

from millrace_router.text.template_shape import TemplateShape

Message = dict[str, Any]
THOUGHT = "reasoning_content"
"""Key of the thought in an assistant's message."""

_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_ALPHABET = string.digits + string.ascii_letters


def messages_for(
    shape: TemplateShape, messages: Sequence[Message], *, no_content: str | None = ""
) -> list[Message]:
    """Return messages in the form of `shape`; keys that OpenAI does not define are kept.

    Content is text, a list of `{"type": "text", "text": …}`, or None beside `tool_calls`, where `no_content` replaces
    it. Arguments of calls are JSON text or the parsed object.
    """
    if shape.has_counted_ids:
        messages = _with_counted_ids(messages)
    if shape.has_one_call:
        messages = _with_single_calls(messages)
    names = _names_of_calls(messages)
    return [_message_for(shape, message, names, no_content) for message in messages]


def _with_counted_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace the ids of calls by `functions.name:0` and so on, and those of their results."""
    ids: dict[str, str] = {}
    num_calls, made = 0, []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            id_ = f"functions.{call['function']['name']}:{num_calls}"
            ids[call.get("id") or id_] = id_
            calls.append({**call, "id": id_})
            num_calls += 1
        changed: Message = {"tool_calls": calls} if calls else {}
        if message.get("tool_call_id") in ids:
            changed["tool_call_id"] = ids[message["tool_call_id"]]
        made.append({**message, **changed})
    return made


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Make a message of each call, with its results behind it."""
    made: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        num_results = next(
            (index for index, one in enumerate(rest) if one["role"] != "tool"), len(rest)
        )
        results, rest = rest[:num_results], rest[num_results:]
        for call in calls:
            made.append({**message, "tool_calls": [call]})
            made += [one for one in results if one.get("tool_call_id") == call.get("id")]
            message = {"role": message["role"], "content": None}
        ids = {call.get("id") for call in calls}
        made += [one for one in results if one.get("tool_call_id") not in ids]
    return made


def lacks_content(message: Message) -> bool:
    """Whether a message has calls alone."""
    return bool(message.get("tool_calls")) and not message.get("content")


def text_of(content: object) -> str:
    """Return content as one string."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    """Names of called functions by the call's id."""
    return {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
        if call.get("id") is not None
    }


def _message_for(
    shape: TemplateShape, message: Message, names: dict[str, str], no_content: str | None
) -> Message:
    role, content, calls = message["role"], message.get("content"), message.get("tool_calls")
    if calls and not shape.names_tool_calls:
        said = text_of(content)
        content, calls = f"{said}\n{_as_text(calls)}" if said else _as_text(calls), None
    made = {key: value for key, value in message.items() if key != "tool_calls"}
    if role == "developer" and not shape.names_developer:
        made["role"] = "system"
    made["content"] = no_content if calls and not content else _content_for(shape, content)
    if calls:
        made["tool_calls"] = [_call_for(shape, call, index) for index, call in enumerate(calls)]
    call_id = message.get("tool_call_id")
    if call_id is not None:
        made["tool_call_id"] = _short(call_id) if shape.has_short_ids else call_id
        if role == "tool" and call_id in names:
            made.setdefault("name", names[call_id])
    if message.get(THOUGHT) is not None:
        _give_thought(shape, made, message[THOUGHT])
    return made


def _give_thought(shape: TemplateShape, made: Message, thought: str) -> None:
    """Put a thought where templates look for it: gpt-oss's has it as `thinking`, Mistral's as a part of the content."""
    made.setdefault("thinking", thought)
    made.setdefault("reasoning", thought)
    if shape.has_thought_parts:
        content = made["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        made["content"] = [{"type": "thinking", "thinking": thought}, *parts]


def _content_for(shape: TemplateShape, content: object) -> object:
    if not shape.loops_over_content:
        return text_of(content)
    if isinstance(content, list) or shape.tests_for_string:
        return content
    return [{"type": "text", "text": text_of(content)}]


def _call_for(shape: TemplateShape, call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    made = {"type": call.get("type", "function")}
    call_id = call.get("id")
    if shape.has_short_ids:
        made["id"] = _short(call_id or str(index))
    elif call_id is not None:
        made["id"] = call_id
    given = function.get("arguments")
    arguments = _text_of_arguments(given) if shape.adds_arguments else _arguments_of(given)
    made["function"] = {"name": function["name"], "arguments": arguments}
    return made


def _arguments_of(given: object) -> object:
    """Return the arguments as an object, or unchanged if they are none."""
    if given is None or given == "":
        return {}
    if not isinstance(given, str):
        return given
    try:
        value = orjson.loads(given)
    except orjson.JSONDecodeError:
        return given
    return value if isinstance(value, dict) else given


def _text_of_arguments(given: object) -> str:
    """Return the arguments as the client's JSON text."""
    return (
        given if given and isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
    )


def _as_text(calls: Sequence[dict[str, Any]]) -> str:
    """Write calls as TGI does for every template, with arguments as text."""
    return orjson.dumps([_call_as_tgi(call) for call in calls]).decode()


def _call_as_tgi(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    given = function.get("arguments")
    arguments = given if isinstance(given, str) else orjson.dumps(given).decode()
    return {
        "id": call.get("id"),
        "type": call.get("type", "function"),
        "function": {"description": None, "name": function["name"], "arguments": arguments},
    }


def _short(call_id: str) -> str:
    """Return nine letters and digits for an id in another form."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode(errors="surrogatepass")).digest())
    digits = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)
