"""What agents sent in the last turn of a conversation, recorded from their packages, is taken as it is.

`python -m tests.ecosystem.agents.record` writes the recordings.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace_router.request.generation_request import GenerationRequest
from millrace_router.validation.validator import Validated
from millrace_testing.router.edge import limits_with, serving
from millrace_testing.router.streams import RESPONSES, events_of, response_of
from millrace_testing.text.texts import saying

FOLDER = Path(__file__).parent / "recorded"
LIMITS = limits_with(max_input_tokens=60_000, max_total_tokens=64_000)
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}"
    "{% for call in turn.tool_calls %}:{{ call.function.name }}{% endfor %} {% endfor %}"
    "{{ tools | map(attribute='function.name') | join(' ') if tools }}"
)
IGNORED = "x-millrace-ignored"
MILL = "assistant:wind tool assistant:grind tool wind grind"
CODEX = (
    "exec_command write_stdin request_user_input view_image multi_agent_v1__close_agent "
    "multi_agent_v1__resume_agent multi_agent_v1__send_input multi_agent_v1__spawn_agent "
    "multi_agent_v1__wait_agent get_goal create_goal update_goal"
)
CODEX_CUSTOM = (
    "functions__exec functions__wait functions__request_user_input collaboration__followup_task "
    "collaboration__interrupt_agent collaboration__list_agents collaboration__send_message "
    "collaboration__spawn_agent collaboration__wait_agent"
)
EXPECTED: dict[str, tuple[str, str]] = {
    "aider": ("", f"system {'user assistant ' * 7}user "),
    "anthropic": (
        "tools.web_search_20250305, tools.bash_20250124",
        f"system user {MILL}",
    ),
    "codex": (
        "tools.web_search",
        f"system system user user {'assistant:exec_command tool ' * 2}{CODEX}",
    ),
    "codex_custom": (
        "reasoning.context, text.verbosity",
        f"{'system ' * 4}user user {'assistant:functions__exec tool ' * 2}{CODEX_CUSTOM}",
    ),
    "langgraph": ("", f"system user {MILL}"),
    "langgraph_responses": ("", f"system user {MILL}"),
    "mcp": ("", f"user {MILL}"),
    "openai_agents": ("tools.web_search, text.verbosity", f"system user {MILL}"),
    "openai_agents_chat": ("", f"system user {MILL}"),
    "openai_agents_custom": ("", "system user assistant:note tool note"),
    "openai_agents_streamed": ("", f"system user {MILL}"),
    "pydantic_ai": ("", f"system user {MILL}"),
    "pydantic_ai_responses": ("", f"system user {MILL}"),
}
"""By recording: what is named as left out, and the turns and tools of the prompt."""
STORED = "openai_agents_stored"
"""It refers to an earlier response."""


async def replayed(name: str, **options: Any) -> tuple[int, str, str, str]:
    """Status, ignored header, prompt and body of the answer to a recording."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    prompts: list[str] = []
    usual = {"limits": LIMITS, "template": TEMPLATE, "tool_call_parser": "hermes"}
    async with serving(saying("a"), **usual | options) as edge:
        validator = edge.services.validator
        validate = validator.validate

        async def spy(request: GenerationRequest) -> Validated:
            prompts.append(request.text)
            return await validate(request)

        validator.validate = spy  # type: ignore[method-assign]
        url = edge.url + kept["path"]
        async with edge.client.post(url, json=kept["body"], headers=kept["headers"]) as answer:
            ignored = answer.headers.get(IGNORED, "")
            return answer.status, ignored, "".join(prompts), await answer.text()


def test_every_recording_is_replayed() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {*EXPECTED, STORED}


@pytest.mark.parametrize("name", EXPECTED)
async def test_a_recorded_request_is_taken(name: str) -> None:
    ignored, prompt = EXPECTED[name]
    status, named, rendered, answer = await replayed(name)
    assert status == 200, answer
    assert named == ignored
    assert rendered == prompt


async def test_a_reference_to_a_response_that_is_not_stored_is_refused() -> None:
    for options in ({}, {"responses_store": 1}):
        status, _, _, answer = await replayed(STORED, **options)
        assert status == 400
        assert "previous_response" in answer


MESSAGES = "/v1/messages"
WIDE = limits_with(max_input_tokens=400, max_total_tokens=900)
ROLES_TEMPLATE = "{{ tools | tojson }}{% for turn in messages %}{{ turn.content }} {% endfor %}"
MESSAGE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "hello"}],
}
ADD_TOOL = {"name": "add", "input_schema": {"type": "object"}}
ANTHROPIC_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "memory_20250818", "name": "memory"},
    {"type": "mcp_toolset", "mcp_server_name": "s"},
]
MESSAGE_NAMES = ", ".join(f"tools.{tool['type']}" for tool in ANTHROPIC_TOOLS)
CACHED = {"cache_control": {"type": "ephemeral"}}


def serving_messages(script: Any = None, **options: Any) -> Any:
    usual = {"limits": WIDE, "template": ROLES_TEMPLATE, "tool_call_parser": "hermes"}
    return serving(script or saying("a", "a", "a"), **usual | options)


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize("is_strict", [False, True], ids=["usual", "strict_fields"])
async def test_tools_of_the_server_are_left_out_and_named(path: str, is_strict: bool) -> None:
    async with serving_messages(strict_fields=is_strict) as edge:
        body = {key: MESSAGE[key] for key in ("model", "messages")} if "count" in path else MESSAGE
        status, answer, response = await edge.post(
            path, body | {"tools": [*ANTHROPIC_TOOLS, ADD_TOOL]}
        )
        assert status == 200, answer
        assert response.headers[IGNORED] == MESSAGE_NAMES
        _, alone, response = await edge.post(path, body | {"tools": [ADD_TOOL]})
        assert IGNORED not in response.headers
        told, expected = (one.get("usage", one)["input_tokens"] for one in (answer, alone))
        assert told == expected


async def test_a_choice_of_a_tool_that_is_left_out_is_refused() -> None:
    async with serving_messages() as edge:
        for choice in ({"type": "tool", "name": "bash"}, {"type": "any"}):
            body = MESSAGE | {"tools": ANTHROPIC_TOOLS, "tool_choice": choice}
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
        *MESSAGE["messages"],
        {"role": "assistant", "content": searched},
        {"role": "user", "content": [result | CACHED]},
    ]
    async with serving_messages() as edge:
        status, answer, response = await edge.post(MESSAGES, MESSAGE | {"messages": turns})
        assert status == 200, answer
        named = ("server_tool_use", "web_search_tool_result", "tool_reference")
        assert response.headers[IGNORED] == ", ".join(f"messages.{name}" for name in named)


async def test_marks_settings_and_beta_headers_change_nothing() -> None:
    usual = MESSAGE | {"system": "be brief", "tools": [ADD_TOOL]}
    system = [{"type": "text", "text": "be brief"} | CACHED]
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"} | CACHED]}]
    more = {
        "system": system,
        "messages": messages,
        "tools": [ADD_TOOL | CACHED | {"type": "custom", "eager_input_streaming": True}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    }
    headers = {
        "anthropic-beta": "claude-code-20250219,not-yet-known-2030-01-01",
        "anthropic-version": "2023-06-01",
        "anthropic-dangerous-direct-browser-access": "true",
    }
    async with serving_messages() as edge:
        _, expected, _ = await edge.post(MESSAGES, usual)
        status, answer, response = await edge.post(
            f"{MESSAGES}?beta=true", usual | more, headers=headers
        )
    assert status == 200, answer
    assert IGNORED not in response.headers
    assert answer["usage"] == expected["usage"]
    assert answer["content"] == expected["content"]


async def test_a_thread_is_refused_so_that_clients_send_the_whole_conversation() -> None:
    async with serving_messages() as edge:
        for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
            status, answer, _ = await edge.post(MESSAGES, MESSAGE | {"thread": thread})
            assert status == 400
            assert "`thread`" in answer["error"]["message"]
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            assert answer["error"]["details"] == details
        status, *_ = await edge.post(MESSAGES, MESSAGE | {"thread": None})
        assert status == 200


TOOLS_TEMPLATE = (
    "{{ tools | tojson }}{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}"
)
RESPONSE: dict[str, Any] = {"model": "gpt", "input": "hello"}
ADD_FUNCTION = {
    "type": "function",
    "name": "add",
    "description": None,
    "parameters": None,
    "strict": False,
}
OPENAI_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": True, "filters": {"allowed_domains": ["a"]}},
    {"type": "local_shell"},
    {"type": "mcp", "server_label": "s", "server_url": "http://mill", "require_approval": "never"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "tool_search"},
    {"type": "apply_patch"},
    {"type": "not_yet_known"},
]
RESPONSE_NAMES = ", ".join(f"tools.{tool['type']}" for tool in OPENAI_TOOLS)
CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": 1}}\n</tool_call>'


def serving_responses(script: Any, **options: Any) -> Any:
    usual = {"limits": WIDE, "template": TOOLS_TEMPLATE, "tool_call_parser": "hermes"}
    return serving(script, **usual | options)


@pytest.mark.parametrize("is_strict", [False, True], ids=["usual", "strict_fields"])
async def test_tools_of_other_types_are_left_out_and_named(is_strict: bool) -> None:
    async with serving_responses(saying("a", "a"), strict_fields=is_strict) as edge:
        status, answer, response = await edge.post(
            RESPONSES, RESPONSE | {"tools": [*OPENAI_TOOLS, ADD_FUNCTION]}
        )
        assert (status, response.headers[IGNORED]) == (200, RESPONSE_NAMES)
        _, alone, response = await edge.post(RESPONSES, RESPONSE | {"tools": [ADD_FUNCTION]})
        assert IGNORED not in response.headers
    assert answer["tools"] == alone["tools"] == [ADD_FUNCTION]
    assert answer["usage"] == alone["usage"]


async def test_a_choice_among_tools_is_one_among_those_that_are_left() -> None:
    searching = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    async with serving_responses(saying("a")) as edge:
        status, *_ = await edge.post(
            RESPONSES, RESPONSE | {"tools": OPENAI_TOOLS, "tool_choice": searching}
        )
        assert status == 200
        for choice in (searching | {"mode": "required"}, {"type": "web_search"}, "required"):
            body = RESPONSE | {"tools": OPENAI_TOOLS, "tool_choice": choice}
            status, answer, _ = await edge.post(RESPONSES, body)
            assert status == 422, answer


async def test_items_without_a_text_are_named() -> None:
    items = [
        {"role": "user", "content": "hello"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    ]
    async with serving_responses(saying("a", "a")) as edge:
        _, _, response = await edge.post(RESPONSES, RESPONSE | {"input": items})
        assert response.headers[IGNORED] == "input.web_search_call, input.reasoning"
        verbose = {"text": {"verbosity": "high"}, "client_metadata": {"a": "b"}}
        _, _, response = await edge.post(RESPONSES, RESPONSE | verbose)
        assert response.headers[IGNORED] == "text.verbosity"


async def test_tools_in_a_namespace_are_called_by_both_names() -> None:
    space = {
        "type": "namespace",
        "name": "agents",
        "description": "d",
        "tools": [ADD_FUNCTION | {"description": "x"}, {"type": "web_search"}],
    }
    asked = RESPONSE | {"tools": [space, ADD_FUNCTION]}
    texts = [CALL % "agents__add", CALL % "add"]
    async with serving_responses(saying(*texts, *texts)) as edge:
        for namespace in ("agents", None):
            _, answer, response = await edge.post(RESPONSES, asked)
            (call,) = answer["output"]
            assert (call["name"], call.get("namespace")) == ("add", namespace)
            assert response.headers[IGNORED] == "tools.web_search"
            assert answer["tools"][0] == space | {"tools": space["tools"][:1]}
        for namespace in ("agents", None):
            (call,) = response_of(await events_of(edge, asked))["output"]
            assert (call["name"], call.get("namespace")) == ("add", namespace)


async def test_a_namespace_without_tools_is_taken() -> None:
    asked = RESPONSE | {"tools": [{"type": "namespace", "name": "agents"}, ADD_FUNCTION]}
    async with serving_responses(saying("a")) as edge:
        assert (await edge.post(RESPONSES, asked))[0] == 200


async def test_a_tool_in_a_namespace_can_be_chosen() -> None:
    space = {"type": "namespace", "name": "agents", "tools": [ADD_FUNCTION]}
    choice = {"type": "function", "name": "add", "namespace": "agents"}
    script = saying(CALL % "agents__add")
    async with serving_responses(script) as edge:
        body = RESPONSE | {"tools": [space], "tool_choice": choice}
        answer = await edge.answer(RESPONSES, body)
        assert answer["tool_choice"] == choice
        status, answer, _ = await edge.post(
            RESPONSES, body | {"tool_choice": choice | {"namespace": "x"}}
        )
        assert status == 422
    assert script.requests[0].grammar is not None


async def test_items_may_bring_tools() -> None:
    item = {
        "type": "additional_tools",
        "id": "at_1",
        "role": "developer",
        "tools": [*OPENAI_TOOLS, ADD_FUNCTION],
    }
    items = [item, {"role": "user", "content": "hello"}]
    async with serving_responses(saying(*[CALL % "add"] * 2)) as edge:
        _, answer, response = await edge.post(RESPONSES, RESPONSE | {"input": items})
        _, same, _ = await edge.post(RESPONSES, RESPONSE | {"tools": [ADD_FUNCTION]})
    assert response.headers[IGNORED] == RESPONSE_NAMES
    assert answer["output"][0]["name"] == "add"
    assert answer["usage"] == same["usage"]
