"""The input of a response becomes the chat that the templates get."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_router.request.generation_request import GenerationRequest
from millrace_router.validation.validator import Validated
from millrace_testing.router.edge import limits_with, serving
from millrace_testing.router.responses import URL

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for message in messages %}{{ message | tojson }}{% if message.tool_calls %} calls{% endif %}"
    "{% if message.role == 'assistant' %}{{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
LIMITS = limits_with(max_input_tokens=100, max_total_tokens=400)
CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'}
OTHER = CALL | {"call_id": "call_2", "arguments": '{"a":2}', "id": "fc_2", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_2",
    "summary": [{"type": "summary_text", "text": "Why?"}],
}
THOUGHTS = {"reasoning_content": "Why?"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def parts(*texts: str, kind: str = "input_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


def turn(*calls: dict[str, Any], content: Any = None) -> dict[str, Any]:
    made = [
        {
            "id": call["call_id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "text": ({"input": "a"}, [said("user", "a")]),
    "instructions": (
        {"input": "a", "instructions": "b"},
        [said("system", "b"), said("user", "a")],
    ),
    "turns": (
        {"input": [said("user", "a"), said("assistant", "b"), said("user", "c")]},
        [said("user", "a"), said("assistant", "b"), said("user", "c")],
    ),
    "items_of_an_answer": (
        {
            "input": [
                said("user", "a"),
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [
                        {"type": "output_text", "text": "b", "annotations": [], "logprobs": []}
                    ],
                },
                said("user", "c"),
            ]
        },
        [said("user", "a"), said("assistant", "b"), said("user", "c")],
    ),
    "parts": (
        {"input": [{"type": "message", "role": "user", "content": parts("a", "b")}]},
        [{"role": "user", "content": parts("a", "b", kind="text")}],
    ),
    "a_thought": (
        {"input": [said("user", "a"), THOUGHT, said("assistant", "b"), said("user", "c")]},
        [said("user", "a"), {**said("assistant", "b"), **THOUGHTS}, said("user", "c")],
    ),
    "a_thought_before_calls": (
        {"input": [said("user", "a"), THOUGHT, CALL, RESULT]},
        [
            said("user", "a"),
            {**turn(CALL), **THOUGHTS},
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ],
    ),
    "a_thought_of_nothing": (
        {"input": [said("user", "a"), THOUGHT, said("user", "c")]},
        [said("user", "a"), said("user", "c")],
    ),
    "calls_of_one_turn": (
        {"input": [said("user", "a"), CALL, REASONING, OTHER, RESULT]},
        [
            said("user", "a"),
            turn(CALL, OTHER),
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ],
    ),
    "a_call_after_text": (
        {"input": [said("user", "a"), said("assistant", "b"), CALL, RESULT]},
        [
            said("user", "a"),
            turn(CALL, content="b"),
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ],
    ),
    "calls_of_two_turns": (
        {"input": [said("user", "a"), CALL, RESULT, OTHER]},
        [
            said("user", "a"),
            turn(CALL),
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
            turn(OTHER),
        ],
    ),
    "a_result_in_parts": (
        {"input": [said("user", "a"), CALL, RESULT | {"output": parts("2", "3")}]},
        [
            said("user", "a"),
            turn(CALL),
            {
                "role": "tool",
                "content": parts("2", "3", kind="text"),
                "tool_call_id": "call_1",
            },
        ],
    ),
}

LEFT_OUT = [
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "mcp_list_tools", "id": "l_1", "server_label": "s", "tools": []},
]
CASES |= {
    "a_custom_call": (
        {
            "input": [
                said("user", "a"),
                {
                    "type": "custom_tool_call",
                    "id": "ctc_1",
                    "call_id": "call_1",
                    "name": "add",
                    "input": 'b "c"\n',
                },
                RESULT | {"type": "custom_tool_call_output"},
            ]
        },
        [
            said("user", "a"),
            turn(CALL | {"arguments": '{"input":"b \\"c\\"\\n"}'}),
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ],
    ),
    "a_call_in_a_namespace": (
        {"input": [said("user", "a"), CALL | {"namespace": "mcp__mill__"}, RESULT]},
        [
            said("user", "a"),
            turn(CALL | {"name": "mcp__mill__add"}),
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
        ],
    ),
    "a_client_s_call": (
        {
            "input": [
                said("user", "a"),
                {
                    "type": "local_shell_call",
                    "id": "lsh_1",
                    "call_id": "call_1",
                    "status": "completed",
                    "action": {"type": "exec", "command": ["ls"], "env": {}},
                },
                {"type": "local_shell_call_output", "id": "call_1", "output": "mill"},
                {
                    "type": "apply_patch_call",
                    "call_id": "call_2",
                    "status": "completed",
                    "operation": {"type": "delete_file", "path": "a"},
                },
                {"type": "apply_patch_call_output", "call_id": "call_2", "status": "failed"},
                {"type": "shell_call", "call_id": "call_3", "action": {"commands": ["ls"]}},
                {
                    "type": "shell_call_output",
                    "call_id": "call_3",
                    "output": [{"stdout": "x", "stderr": ""}],
                },
            ]
        },
        [
            said("user", "a"),
            turn(
                CALL
                | {
                    "name": "local_shell",
                    "arguments": '{"type":"exec","command":["ls"],"env":{}}',
                }
            ),
            {"role": "tool", "content": "mill", "tool_call_id": "call_1"},
            turn(OTHER | {"name": "apply_patch", "arguments": '{"type":"delete_file","path":"a"}'}),
            {"role": "tool", "content": "failed", "tool_call_id": "call_2"},
            turn(
                OTHER | {"call_id": "call_3", "name": "shell", "arguments": '{"commands":["ls"]}'}
            ),
            {
                "role": "tool",
                "content": '[{"stdout":"x","stderr":""}]',
                "tool_call_id": "call_3",
            },
        ],
    ),
    "a_call_of_a_server": (
        {
            "input": [
                said("user", "a"),
                {
                    "type": "mcp_call",
                    "id": "mcp_1",
                    "server_label": "s",
                    "name": "add",
                    "arguments": "{}",
                    "output": "2",
                },
            ]
        },
        [
            said("user", "a"),
            turn(CALL | {"call_id": "mcp_1", "arguments": "{}"}),
            {"role": "tool", "content": "2", "tool_call_id": "mcp_1"},
        ],
    ),
    "what_is_left_out": (
        {"input": [said("user", "a"), *LEFT_OUT, said("assistant", "b"), said("user", "c")]},
        [said("user", "a"), said("assistant", "b"), said("user", "c")],
    ),
}


async def prompts_of(*asked: tuple[str, dict[str, Any]]) -> list[str]:
    """The prompts that these bodies become, each posted to its path."""
    prompts: list[str] = []
    async with serving(limits=LIMITS, template=TEMPLATE) as edge:
        validator = edge.services.validator
        validate = validator.validate

        async def spy(request: GenerationRequest) -> Validated:
            prompts.append(request.text)
            return await validate(request)

        validator.validate = spy  # type: ignore[method-assign]
        for path, body in asked:
            status, answer, _ = await edge.post(path, body)
            assert status == 200, answer
    return prompts


@pytest.mark.parametrize("name", CASES)
async def test_the_prompt_equals_the_chats(name: str) -> None:
    body, messages = CASES[name]
    given, expected = await prompts_of((URL, body), (CHAT, {"messages": messages}))
    assert given == expected


async def test_an_answer_is_a_separate_turn() -> None:
    turns = [said("user", "a"), said("assistant", "b")]
    own = {"messages": turns, "continue_final_message": False, "add_generation_prompt": True}
    given, expected, continued = await prompts_of(
        (URL, {"input": turns}), (CHAT, own), (CHAT, {"messages": turns})
    )
    assert given == expected != continued


async def test_turns_are_joined_where_the_template_wants_one_of_a_role() -> None:
    template = (
        "{% for message in messages %}"
        "{% if not loop.first and message.role == loop.previtem.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ message.role }} {{ message.content }} {% endfor %}"
    )
    said_twice = [said("user", "a"), said("user", "b")]
    turns = [said("developer", "rules"), said("developer", "skills"), *said_twice]
    async with serving(limits=LIMITS, template=template) as edge:
        status, answer, _ = await edge.post(URL, {"input": turns})
        assert status == 200, answer
        joined = [said("developer", "rules\n\nskills"), said("user", "a\n\nb")]
        _, same, _ = await edge.post(URL, {"input": joined})
        refused, _, _ = await edge.post(CHAT, {"messages": said_twice})
    assert answer["usage"] == same["usage"]
    assert refused == 422
