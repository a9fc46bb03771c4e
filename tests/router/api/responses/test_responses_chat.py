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
async def test_the_prompt_is_that_of_the_same_chat(name: str) -> None:
    body, messages = CASES[name]
    given, expected = await prompts_of((URL, body), (CHAT, {"messages": messages}))
    assert given == expected


async def test_an_answer_is_a_turn_of_its_own() -> None:
    turns = [said("user", "a"), said("assistant", "b")]
    own = {"messages": turns, "continue_final_message": False, "add_generation_prompt": True}
    given, expected, continued = await prompts_of(
        (URL, {"input": turns}), (CHAT, own), (CHAT, {"messages": turns})
    )
    assert given == expected != continued
