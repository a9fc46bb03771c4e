"""Anthropic's requests become chats in OpenAI's terms, or are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace_router.api.anthropic.request import CountTokensRequest, MessagesRequest
from millrace_router.api.anthropic.to_chat import NAMES, chat_of
from millrace_router.api.chat.chat import Chat
from millrace_router.errors import BodyShapeError, ValidationError
from millrace_router.request.dialect import MILLRACE
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.request import GrammarKind
from millrace_router.server.bodies import to_model
from millrace_router.tool_calls.tool import Tool, ToolChoice

USER = {"role": "user", "content": "hello"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
CALLED = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a":1}'},
}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TOOL = {"name": "add", "description": "Adds", "input_schema": {"type": "object"}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def translated(body: dict[str, Any]) -> Chat:
    """The chat that a body becomes."""
    asked = to_model({"max_tokens": 5, "messages": [USER]} | body, MessagesRequest)
    return chat_of(asked, MILLRACE)


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a string": ([USER], [USER]),
    "blocks of text, a line each": (
        [{"role": "user", "content": [text("a"), text("b")]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    "turns of one role are one": (
        [USER, {"role": "user", "content": [text("again")]}],
        [{"role": "user", "content": "hello\nagain"}],
    ),
    "passages and documents are text": (
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "search_result",
                        "source": "http://x",
                        "title": "t",
                        "content": [text("a"), text("b")],
                    },
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": "c"},
                        "title": "d",
                        "context": "e",
                    },
                    {"type": "document", "source": {"type": "content", "content": [text("f")]}},
                ],
            }
        ],
        [{"role": "user", "content": "t\nhttp://x\na\nb\nd\ne\nc\nf"}],
    ),
    "what Anthropic's tools left is left out": (
        [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    text("a"),
                ],
            },
            USER,
        ],
        [USER, {"role": "assistant", "content": "a"}, USER],
    ),
    "no blocks": ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    "a system turn in between": (
        [USER, {"role": "system", "content": "be brief"}, USER],
        [USER, {"role": "system", "content": "be brief"}, USER],
    ),
    "thoughts are given back": (
        [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("hi"),
                ],
            },
        ],
        [USER, {"role": "assistant", "content": "hi", "reasoning_content": "hm"}],
    ),
    "a call and its result": (
        [
            USER,
            {"role": "assistant", "content": [text("I add."), CALL]},
            {"role": "user", "content": [RESULT | {"content": "2"}]},
        ],
        [
            USER,
            {"role": "assistant", "content": "I add.", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
        ],
    ),
    "a call without text is a message without content": (
        [
            USER,
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [RESULT | {"content": [text("2"), text("3")]}]},
        ],
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2\n3"},
        ],
    ),
    "text around results stays where it is": (
        [
            {
                "role": "user",
                "content": [
                    text("before"),
                    RESULT,
                    RESULT | {"tool_use_id": "toolu_2", "content": None},
                    text("after"),
                ],
            }
        ],
        [
            {"role": "user", "content": "before"},
            {"role": "tool", "tool_call_id": "1", "content": ""},
            {"role": "tool", "tool_call_id": "2", "content": ""},
            {"role": "user", "content": "after"},
        ],
    ),
    "results of calls that failed": (
        [
            {
                "role": "user",
                "content": [
                    RESULT | {"content": "no such file", "is_error": True},
                    RESULT | {"is_error": True},
                    RESULT | {"content": "fine", "is_error": False},
                ],
            }
        ],
        [
            {"role": "tool", "tool_call_id": "1", "content": said}
            for said in ("Error: no such file", "Error", "fine")
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_turns_are_translated(name: str) -> None:
    turns, expected = CONVERSATIONS[name]
    assert translated({"messages": turns}).messages == expected


@pytest.mark.parametrize("system", ["be kind", [text("be"), text("kind")]], ids=["text", "blocks"])
def test_the_system_prompt_comes_first(system: object) -> None:
    first, second = translated({"system": system}).messages
    assert first["role"] == "system"
    assert first["content"].split() == ["be", "kind"]
    assert second == USER


def test_parameters_are_translated() -> None:
    asked = {
        "model": "claude",
        "stop_sequences": ["x"],
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
        "service_tier": "auto",
    }
    assert translated(asked) == Chat(
        request=GenerationRequest(
            max_new_tokens=5,
            stop=("x",),
            do_sample=True,
            temperature=0.5,
            top_p=0.75,
            top_k=5,
            names=NAMES,
        ),
        messages=[USER],
        template_variables={"enable_thinking": False, "thinking": False},
    )


def test_a_null_is_as_good_as_nothing() -> None:
    optional = set(MessagesRequest.model_fields) - {"messages", "max_tokens"}
    assert translated(dict.fromkeys(optional)) == translated({})


def test_a_top_p_of_one_does_not_restrict() -> None:
    assert translated({"top_p": 1}).request.top_p is None


def test_a_schema_becomes_the_grammar_of_the_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {
        "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    }
    assert translated(asked).request.grammar == RawGrammar(GrammarKind.JSON_SCHEMA, schema)


def test_tools_are_translated() -> None:
    tools = [
        TOOL | {"strict": True, "cache_control": {"type": "ephemeral"}},
        TOOL | {"type": "custom"},
    ]
    first, second = translated({"tools": tools}).tools
    assert first == Tool("add", "Adds", {"type": "object"}, strict=True)
    assert second == replace(first, strict=False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, "named"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else value,
)
def test_tool_choices_are_translated(choice: dict[str, Any], expected: Any) -> None:
    for parallel in (True, False):
        asked = choice | {"disable_parallel_tool_use": not parallel}
        chat = translated({"tools": [TOOL], "tool_choice": asked})
        assert chat.choice == ToolChoice(expected, choice.get("name"), parallel)


def in_content(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, USER]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "`max_tokens` must be an integer"),
    "none to generate": ({"max_tokens": 0}, "`max_tokens` must be >= 1"),
    "no turns": ({"messages": []}, "`messages` must have at least 1 item"),
    "another role": (
        {"messages": [{"role": "tool", "content": "x"}]},
        "`messages[0].role` must be ",
    ),
    "an image": (
        in_content(IMAGE),
        "`messages[0].content[0]` must be a block of type 'text'",
    ),
    "another block": (in_content({"type": "telepathy"}), "images and all others are not supported"),
    "a document that is not text": (
        in_content({"type": "document", "source": {"type": "base64", "data": ""}}),
        "`messages[0].content[0].source` must be of type 'text' or 'content'",
    ),
    "an image in a result": (
        in_content(RESULT | {"content": [IMAGE]}),
        "`messages[0].content[0].content[0]` must be a block of type 'text'",
    ),
    "a call by the user": (
        in_content(CALL),
        "a turn of role 'user' has no block of type 'tool_use'",
    ),
    "a result by the assistant": (in_content(RESULT, "assistant"), "'tool_result'"),
    "another kind of thoughts": (
        {"thinking": {"type": "deep"}},
        "`thinking.type` must be 'enabled', 'adaptive', 'between_tools' or 'disabled'",
    ),
    "thoughts without room": (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "`thinking.budget_tokens` must be >= 1",
    ),
    "a tool without a schema": ({"tools": [{"name": "add"}]}, "`tools[0].input_schema`"),
    "a choice of no tool": ({"tool_choice": {"type": "tool"}}, "needs a `name`"),
    "a number as text": ({"top_k": "5"}, "`top_k` must be an integer"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_the_error_names_the_malformed_field(name: str) -> None:
    body, message = MALFORMED[name]
    with pytest.raises(BodyShapeError) as caught:
        translated(body)
    assert message in caught.value.client_text


def test_a_call_at_the_end_lacks_its_result() -> None:
    with pytest.raises(ValidationError, match="tool_result"):
        translated({"messages": [USER, {"role": "assistant", "content": [CALL]}]})


def test_tokens_are_counted_without_what_only_an_answer_needs() -> None:
    asked = to_model({"messages": [USER], "system": "be kind", "tools": [TOOL]}, CountTokensRequest)
    assert chat_of(asked, MILLRACE).request == GenerationRequest(names=NAMES)
