"""The form of messages that a chat template expects, as its syntax tree shows, and messages in that form."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from jinja2 import nodes
from pydantic_core import from_json

_COUNTS_CALLS = re.compile(r"(?:in\s+\w+\.tool_calls|tool_calls\s*\|\s*(?:length|count))")
_TESTS_SHORT_ID = re.compile(r"length\s*[!=]=\s*9\b")


ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Roles that every template gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateShape:
    """Features of a chat template. Without a feature, messages are converted to plain text."""

    names_tools: bool = False
    """Whether it renders tools."""
    names_tool_calls: bool = False
    """Whether it renders calls of earlier messages."""
    loops_over_content: bool = False
    """Whether content may be a list of parts."""
    tests_for_string: bool = False
    """Whether it tests content for being a string, so that both forms are valid."""
    tests_for_none: bool = False
    """Whether it tests content for None, in a message with only calls."""
    names_developer: bool = False
    """Whether it has the role `developer`."""
    has_short_ids: bool = False
    """Whether call ids must have nine characters, as in Mistral's templates."""
    has_counted_ids: bool = False
    """Whether call ids have the name and a number, as in Kimi's templates."""
    has_one_call: bool = False
    """Whether it renders the first call of a message and silently drops the others, as gpt-oss' does."""
    adds_arguments: bool = False
    """Whether it adds a call's arguments to text, so that they must be text, as in DeepSeek's templates."""

    texts: frozenset[str] = frozenset()
    """All its texts, among which are the names of further roles."""
    has_thought_parts: bool = False
    """Whether a thought may be a part of the content, as in Mistral's templates."""

    @classmethod
    def of(cls, tree: nodes.Template, source: str) -> TemplateShape:
        constants = {
            node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)
        }
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        content = _Content(tree)
        return cls(
            texts=frozenset(constants),
            names_tools=any(
                node.name == "tools" and node.ctx == "load" for node in tree.find_all(nodes.Name)
            ),
            names_tool_calls="tool_calls" in constants | attributes,
            loops_over_content=any(content.has(loop.iter) for loop in tree.find_all(nodes.For)),
            tests_for_string=any(
                test.name == "string" and content.has(test.node)
                for test in tree.find_all(nodes.Test)
            ),
            tests_for_none=any(
                test.name == "none" and content.has(test.node) for test in tree.find_all(nodes.Test)
            ),
            names_developer="developer" in constants,
            has_thought_parts="thinking" in constants and "[THINK]" in source,
            has_short_ids=_TESTS_SHORT_ID.search(source) is not None,
            has_counted_ids="<|tool_call_begin|>" in source,
            has_one_call="tool_calls[0]" in source and not _COUNTS_CALLS.search(source),
            adds_arguments=_adds_arguments(tree),
        )


def _adds_arguments(tree: nodes.Template) -> bool:
    """Return whether arguments are an operand of text, and the template never treats them as an object."""
    operands: list[nodes.Node] = []
    for binary in tree.find_all(nodes.Add):
        operands += [binary.left, binary.right]
    for concat in tree.find_all(nodes.Concat):
        operands += concat.nodes
    for output in tree.find_all(nodes.Output):
        operands += output.nodes
    others: list[nodes.Node] = [test.node for test in tree.find_all(nodes.Test)]
    others += [filtered.node for filtered in tree.find_all(nodes.Filter) if filtered.node]
    others += [loop.iter for loop in tree.find_all(nodes.For)]
    return any(map(_is_arguments, operands)) and not any(map(_is_arguments, others))


def _is_arguments(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="arguments"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="arguments")):
            return True
    return False


class _Content:
    """Finds expressions for a message's content: by key, or by a variable that it was assigned to."""

    def __init__(self, tree: nodes.Template) -> None:
        self._names: set[str] = set()
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        assignments = list(tree.find_all(nodes.Assign))
        calls = list(tree.find_all(nodes.Call))
        num_known = -1
        while num_known < len(self._names):
            num_known = len(self._names)
            for assignment in assignments:
                if isinstance(assignment.target, nodes.Name) and self.has(assignment.node):
                    self._names.add(assignment.target.name)
            for call in calls:
                if isinstance(call.node, nodes.Name) and call.node.name in macros:
                    self._give(macros[call.node.name], call)

    def _give(self, macro: nodes.Macro, call: nodes.Call) -> None:
        for parameter, argument in zip(macro.args, call.args, strict=False):
            if self.has(argument):
                self._names.add(parameter.name)

    def has(self, node: nodes.Node) -> bool:
        """Return whether `node` is the content or a part of it."""
        match node:
            case nodes.Name():
                return node.name in self._names
            case nodes.Getattr():
                return node.attr == "content"
            case nodes.Getitem(arg=nodes.Const() as key):
                return bool(key.value == "content")
            case nodes.Getitem(arg=nodes.Slice()):
                return self.has(node.node)
            case nodes.Filter(node=nodes.Expr() as filtered):
                return self.has(filtered)
            case nodes.CondExpr():
                return self.has(node.expr1) or (node.expr2 is not None and self.has(node.expr2))
        return False


Message = dict[str, Any]
THOUGHT = "reasoning_content"
"""Key of the thought in an assistant's message."""

_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_ALPHABET = string.digits + string.ascii_letters


def messages_for(
    shape: TemplateShape,
    messages: Sequence[Message],
    *,
    no_content: str | None = "",
    picture: str = "",
) -> list[Message]:
    """Return messages in the form of `shape`; keys that OpenAI does not define are kept.

    Content is text, a list of `{"type": "text", "text": …}`, or None next to `tool_calls`, where `no_content` replaces
    it. Arguments of calls are JSON text or the parsed object. `picture` stands for one in a text.
    """
    if shape.has_counted_ids:
        messages = _with_counted_ids(messages)
    if shape.has_one_call:
        messages = _with_single_calls(messages)
    names = _names_of_calls(messages)
    if not shape.loops_over_content:
        messages = [_with_text(message, picture) for message in messages]
    return [_message_for(shape, message, names, no_content) for message in messages]


def _with_text(message: Message, picture: str) -> Message:
    """Return the message with its content as one text, in which `picture` stands for each picture."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = (picture if part.get("type") == "image" else part.get("text", "") for part in content)
    return {**message, "content": "".join(texts)}


def _with_counted_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace the ids of calls and of their results by `functions.name:0` and so on."""
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
    """Return whether a message has only calls."""
    return bool(message.get("tool_calls")) and not message.get("content")


def text_of(content: object) -> str:
    """Return the text of content, without its pictures."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content if isinstance(content, str) else ""


def image_part(source: object) -> dict[str, Any]:
    """Return a picture as a part of a message, for `without_sources`."""
    return {"type": "image", "source": source}


def without_sources(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Return messages with pictures as templates take them, and the sources of the pictures in order."""
    sources: list[Any] = []
    made: list[Message] = []
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list) and any("source" in part for part in parts):
            sources += [part["source"] for part in parts if "source" in part]
            parts = [{"type": "image"} if "source" in part else part for part in parts]
            message = {**message, "content": parts}  # noqa: PLW2901
        made.append(message)
    return made, sources


def num_images(messages: Sequence[Message]) -> int:
    """Return the number of pictures in messages."""
    contents = (message.get("content") for message in messages)
    return sum(
        part.get("type") == "image"
        for content in contents
        if isinstance(content, list)
        for part in content
    )


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
        text = text_of(content)
        content, calls = f"{text}\n{_as_text(calls)}" if text else _as_text(calls), None
    converted = {key: value for key, value in message.items() if key != "tool_calls"}
    if role == "developer" and not shape.names_developer:
        converted["role"] = "system"
    converted["content"] = no_content if calls and not content else _content_for(shape, content)
    if calls:
        converted["tool_calls"] = [
            _call_for(shape, call, index) for index, call in enumerate(calls)
        ]
    call_id = message.get("tool_call_id")
    if call_id is not None:
        converted["tool_call_id"] = _short(call_id) if shape.has_short_ids else call_id
        if role == "tool" and call_id in names:
            converted.setdefault("name", names[call_id])
    if message.get(THOUGHT) is not None:
        _give_thought(shape, converted, message[THOUGHT])
    return converted


def _give_thought(shape: TemplateShape, message: Message, thought: str) -> None:
    """Put a thought where templates look for it: gpt-oss's has it as `thinking`, Mistral's as a part of the content."""
    message.setdefault("thinking", thought)
    message.setdefault("reasoning", thought)
    if shape.has_thought_parts:
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        message["content"] = [{"type": "thinking", "thinking": thought}, *parts]


def _content_for(shape: TemplateShape, content: object) -> object:
    if not shape.loops_over_content:
        return text_of(content)
    if isinstance(content, list) or shape.tests_for_string:
        return content
    return [{"type": "text", "text": text_of(content)}]


def _call_for(shape: TemplateShape, call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    converted = {"type": call.get("type", "function")}
    call_id = call.get("id")
    if shape.has_short_ids:
        converted["id"] = _short(call_id or str(index))
    elif call_id is not None:
        converted["id"] = call_id
    raw = function.get("arguments")
    arguments = _text_of_arguments(raw) if shape.adds_arguments else _arguments_of(raw)
    converted["function"] = {"name": function["name"], "arguments": arguments}
    return converted


def _arguments_of(arguments: object) -> object:
    """Return the arguments as an object, over which templates iterate.

    Of a call that was cut it has the members that are there, because the conversation would be of no use otherwise.
    """
    value = arguments
    if isinstance(arguments, str):
        try:
            value = from_json(arguments or "{}", allow_partial="trailing-strings")
        except ValueError:
            value = arguments
    if value is None or isinstance(value, dict):
        return value or {}
    return {"arguments": value}


def _text_of_arguments(arguments: object) -> str:
    """Return the arguments as the client's JSON text."""
    return (
        arguments
        if arguments and isinstance(arguments, str)
        else json.dumps(arguments or {}, ensure_ascii=False)
    )


def _as_text(calls: Sequence[dict[str, Any]]) -> str:
    """Write calls as TGI does for every template, with arguments as text."""
    return orjson.dumps([_call_as_tgi(call) for call in calls]).decode()


def _call_as_tgi(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    raw = function.get("arguments")
    arguments = raw if isinstance(raw, str) else orjson.dumps(raw).decode()
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
