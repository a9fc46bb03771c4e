"""The input of a response becomes the chat that the templates get."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from millrace_router.api.responses.protocol import ResponseEventJson, ResponseJson
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import GrammarKind
from millrace_router.validation.validator import Validated
from millrace_testing.router.edge import limits_with, serving
from millrace_testing.router.streams import RESPONSES, events_of, response_of, without_ids
from millrace_testing.text.texts import saying, tokenizer

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

PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def input_text(text: str) -> dict[str, str]:
    return {"type": "input_text", "text": text}


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
    "nulls": (
        {
            "input": [
                said("user", "a"),
                {"type": "custom_tool_call", "call_id": "call_1", "name": "add", "input": None},
                RESULT | {"type": "custom_tool_call_output"},
                {
                    "type": "mcp_call",
                    "id": "mcp_1",
                    "name": "add",
                    "arguments": None,
                    "output": "2",
                },
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": None}]},
                said("user", "b"),
            ]
        },
        [
            said("user", "a"),
            turn(CALL | {"arguments": '{"input": ""}'}),
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
            turn(CALL | {"call_id": "mcp_1", "arguments": "{}"}),
            {"role": "tool", "content": "2", "tool_call_id": "mcp_1"},
            said("user", "b"),
        ],
    ),
    "what_cannot_be_read": (
        {
            "input": [
                {"type": "compaction", "encrypted_content": "x"},
                {"type": "message", "role": "user", "content": [PICTURE, input_text("a")]},
                {"type": "telepathy", "id": "t"},
                said("assistant", "b"),
                said("user", "c"),
            ]
        },
        [
            said("user", "[compaction left out]"),
            said("user", "[image left out]a"),
            said("user", "[telepathy left out]"),
            said("assistant", "b"),
            said("user", "c"),
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
            await edge.answer(path, body)
    return prompts


@pytest.mark.parametrize("name", CASES)
async def test_the_prompt_equals_the_chats(name: str) -> None:
    body, messages = CASES[name]
    given, expected = await prompts_of((RESPONSES, body), (CHAT, {"messages": messages}))
    assert given == expected


async def test_an_answer_is_a_separate_turn() -> None:
    turns = [said("user", "a"), said("assistant", "b")]
    own = {"messages": turns, "continue_final_message": False, "add_generation_prompt": True}
    given, expected, continued = await prompts_of(
        (RESPONSES, {"input": turns}), (CHAT, own), (CHAT, {"messages": turns})
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
        answer = await edge.answer(RESPONSES, {"input": turns})
        joined = [said("developer", "rules\n\nskills"), said("user", "a\n\nb")]
        _, same, _ = await edge.post(RESPONSES, {"input": joined})
        _, chat, _ = await edge.post(CHAT, {"messages": turns})
    assert answer["usage"] == same["usage"]
    assert chat["usage"]["prompt_tokens"] == answer["usage"]["input_tokens"]


BYTES = tokenizer("byte_level")
WIDE = limits_with(max_input_tokens=400, max_total_tokens=900)
CUSTOM_TEMPLATE = "{{ tools | tojson }}{% for turn in messages %}{{ turn.content }} {% endfor %}"
PATCH = '*** Begin\n+print("é")\t\\\n*** End'
LARK = 'start: "*** Begin" LF line+ "*** End"\nline: "+" /(.*)/ LF\n%import common.LF'
FORMATS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "text": {"type": "text"},
    "lark": {"type": "grammar", "syntax": "lark", "definition": LARK},
    "regex": {"type": "grammar", "syntax": "regex", "definition": "[^x]*"},
}


def tool(format_: str = "none", **more: Any) -> dict[str, Any]:
    given = {} if FORMATS[format_] is None else {"format": FORMATS[format_]}
    return {"type": "custom", "name": "patch", "description": "Changes files.", **given, **more}


def asked(format_: str, **more: Any) -> dict[str, Any]:
    return {"input": "hello", "tools": [tool(format_)], **more}


def call(arguments: Any = None, name: str = "patch") -> str:
    """A call in the format of the served model."""
    given = {"input": PATCH} if arguments is None else arguments
    inside = json.dumps({"name": name, "arguments": given}, ensure_ascii=False)
    return f"<tool_call>\n{inside}\n</tool_call>"


def served(script: Any) -> Any:
    return serving(script, limits=WIDE, template=CUSTOM_TEMPLATE, tool_call_parser="hermes")


def item(text: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "custom_tool_call", "status": status, "name": "patch", "input": text}


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_call_is_a_text(format_: str) -> None:
    script = saying(*[f"Now.{call()}"] * 2)
    async with served(script) as edge:
        answer = await edge.answer(RESPONSES, asked(format_))
        events = await events_of(edge, asked(format_))
    TypeAdapter(ResponseJson).validate_python(answer, strict=True)
    TypeAdapter(list[ResponseEventJson]).validate_python(events, strict=True)
    message, called = without_ids(answer)["output"]
    assert message["content"][0]["text"] == "Now."
    assert called == item(PATCH)
    assert without_ids(response_of(events)) == without_ids(answer)
    deltas = [one for one in events if one["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 3
    assert answer["tools"] == [tool(format_, format=FORMATS[format_] or {"type": "text"})]
    grammars = [request.grammar for request in script.requests]
    assert [grammar is not None for grammar in grammars] == [format_ in {"lark", "regex"}] * 2


async def test_the_prompt_describes_the_format() -> None:
    prompts = []
    async with served(saying("a", "a")) as edge:
        for format_ in ("none", "lark"):
            _, counted, _ = await edge.post(f"{RESPONSES}/input_tokens", asked(format_))
            prompts.append(counted["input_tokens"])
    assert prompts[1] > prompts[0]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "patch"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "patch"}],
        },
        "required",
    ],
)
async def test_a_call_may_be_forced(choice: Any) -> None:
    script = saying(call())
    async with served(script) as edge:
        answer = await edge.answer(RESPONSES, asked("none", tool_choice=choice))
    assert without_ids(answer)["output"] == [item(PATCH)]
    (request,) = script.requests
    assert request.grammar is not None
    assert request.grammar.kind is GrammarKind.LARK


async def test_functions_and_custom_tools_mix() -> None:
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    text = f"{call({'a': 1}, 'add')}\n{call()}"
    body = asked("none") | {"tools": [add, tool()]}
    async with served(saying(text, text)) as edge:
        _, answer, _ = await edge.post(RESPONSES, body)
        events = await events_of(edge, body)
    assert [one["type"] for one in answer["output"]] == ["function_call", "custom_tool_call"]
    assert without_ids(response_of(events)) == without_ids(answer)


@pytest.mark.parametrize("arguments", [{"patch": "a"}, {}, {"input": 1}])
async def test_arguments_of_another_shape_are_the_input_as_they_are(arguments: Any) -> None:
    async with served(saying(call(arguments))) as edge:
        _, answer, _ = await edge.post(RESPONSES, asked("none"))
    assert without_ids(answer)["output"] == [item(json.dumps(arguments))]


async def test_a_call_that_is_cut_is_text_and_in_a_stream_incomplete() -> None:
    text = call()[:-30]
    limit = {"max_output_tokens": len(BYTES.encode(text))}
    async with served(saying(text, text)) as edge:
        _, answer, _ = await edge.post(RESPONSES, asked("none", **limit))
        events = await events_of(edge, asked("none", **limit))
    (said,) = without_ids(answer)["output"]
    assert said["content"][0]["text"] == text
    (called,) = response_of(events)["output"]
    assert (called["type"], called["status"]) == ("custom_tool_call", "incomplete")
    assert PATCH.startswith(called["input"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "grammar", "syntax": "ebnf", "definition": "a"}, "syntax"),
        ({"type": "grammar", "syntax": "lark"}, "definition"),
        ({"type": "yaml"}, "format"),
        (
            {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "a"'},
            "start",
        ),
        ({"type": "grammar", "syntax": "lark", "definition": 'start: "a"\n%ignore " "'}, "%ignore"),
        ({"type": "grammar", "syntax": "regex", "definition": r"\bword"}, "\\b"),
        ({"type": "grammar", "syntax": "regex", "definition": "a" * 2**18}, "bytes"),
    ],
)
async def test_a_format_that_cannot_be_kept_is_refused_by_name(given: Any, said: str) -> None:
    async with served(saying("a")) as edge:
        for stream in (False, True):
            body = {"input": "hello", "tools": [tool() | {"format": given}], "stream": stream}
            status, answer, _ = await edge.post(RESPONSES, body)
            assert status == 422
            assert said in answer["error"]["message"], answer
    assert edge.batcher.requests == []
