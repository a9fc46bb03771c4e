"""What agents send to Anthropic's API in addition to a chat: their server's tools and blocks, marks, beta headers."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_testing.router.edge import limits_with, serving
from millrace_testing.text.texts import Generations, tokenizer

BYTES = tokenizer("byte_level")
MESSAGES = "/v1/messages"
IGNORED = "x-millrace-ignored"
WIDE = limits_with(max_input_tokens=400, max_total_tokens=900)
TEMPLATE = "{{ tools | tojson }}{% for turn in messages %}{{ turn.content }} {% endfor %}"
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hello"}],
}
ADD = {"name": "add", "input_schema": {"type": "object"}}
FOREIGN: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "mcp_toolset", "mcp_server_name": "s"},
]
NAMES = ", ".join(f"tools.{tool['type']}" for tool in FOREIGN)
CACHED = {"cache_control": {"type": "ephemeral"}}


def says(*texts: str) -> Generations:
    """A script that says each text to one request after the other, and ends."""
    return Generations(*([*BYTES.encode(text), 0] for text in texts), tokenizer=BYTES)


def served(script: Any = None, **options: Any) -> Any:
    usual = {"limits": WIDE, "template": TEMPLATE, "tool_call_parser": "hermes"}
    return serving(script or says("a", "a", "a"), **usual | options)


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize("is_strict", [False, True], ids=["usual", "strict_fields"])
async def test_tools_of_the_server_are_left_out_and_named(path: str, is_strict: bool) -> None:
    async with served(strict_fields=is_strict) as edge:
        body = {key: ASKED[key] for key in ("model", "messages")} if "count" in path else ASKED
        status, answer, response = await edge.post(path, body | {"tools": [*FOREIGN, ADD]})
        assert status == 200, answer
        assert response.headers[IGNORED] == NAMES
        _, alone, response = await edge.post(path, body | {"tools": [ADD]})
        assert IGNORED not in response.headers
        told, expected = (one.get("usage", one)["input_tokens"] for one in (answer, alone))
        assert told == expected


async def test_a_choice_of_a_tool_that_is_left_out_is_refused() -> None:
    async with served() as edge:
        for choice in ({"type": "tool", "name": "bash"}, {"type": "any"}):
            body = ASKED | {"tools": FOREIGN, "tool_choice": choice}
            status, answer, _ = await edge.post(MESSAGES, body)
            assert status == 400
            assert answer["error"]["type"] == "invalid_request_error"


async def test_blocks_without_a_text_are_named() -> None:
    searched = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "x"}]},
        {"type": "text", "text": "a", "citations": []},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}},
    ]
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "2"}, {"type": "tool_reference", "tool_name": "b"}],
    }
    turns = [
        *ASKED["messages"],
        {"role": "assistant", "content": searched},
        {"role": "user", "content": [result | CACHED]},
    ]
    async with served() as edge:
        status, answer, response = await edge.post(MESSAGES, ASKED | {"messages": turns})
        assert status == 200, answer
        named = ("server_tool_use", "web_search_tool_result", "tool_reference")
        assert response.headers[IGNORED] == ", ".join(f"messages.{name}" for name in named)


async def test_marks_settings_and_beta_headers_change_nothing() -> None:
    usual = ASKED | {"system": "be brief", "tools": [ADD]}
    system = [{"type": "text", "text": "be brief"} | CACHED]
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"} | CACHED]}]
    more = {
        "system": system,
        "messages": messages,
        "tools": [ADD | CACHED | {"type": "custom", "eager_input_streaming": True}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    headers = {
        "anthropic-beta": "claude-code-20250219,not-yet-known-2030-01-01",
        "anthropic-version": "2023-06-01",
        "anthropic-dangerous-direct-browser-access": "true",
    }
    async with served() as edge:
        _, expected, _ = await edge.post(MESSAGES, usual)
        status, answer, response = await edge.post(
            f"{MESSAGES}?beta=true", usual | more, headers=headers
        )
    assert status == 200, answer
    assert IGNORED not in response.headers
    assert answer["usage"] == expected["usage"]
    assert answer["content"] == expected["content"]


async def test_a_thread_is_refused_so_that_clients_send_the_whole_conversation() -> None:
    async with served() as edge:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            status, answer, _ = await edge.post(MESSAGES, ASKED | {"thread": thread})
            assert status == 400
            assert "`thread`" in answer["error"]["message"]
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            assert answer["error"]["details"] == details
        status, *_ = await edge.post(MESSAGES, ASKED | {"thread": None})
        assert status == 200
