"""`custom` tools: the model writes a text, by a grammar if there is one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from millrace_router.api.responses.protocol import ResponseEventJson, ResponseJson
from millrace_router.request.request import GrammarKind
from millrace_testing.router.edge import limits_with, serving
from millrace_testing.router.responses import URL, events_of, response_of, without_ids
from millrace_testing.text.texts import Generations, tokenizer

BYTES = tokenizer("byte_level")
WIDE = limits_with(max_input_tokens=400, max_total_tokens=900)
TEMPLATE = "{{ tools | tojson }}{% for turn in messages %}{{ turn.content }} {% endfor %}"
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


def says(*texts: str) -> Generations:
    """A script that says each text to one request after the other, and ends."""
    return Generations(*([*BYTES.encode(text), 0] for text in texts), tokenizer=BYTES)


def served(script: Any) -> Any:
    return serving(script, limits=WIDE, template=TEMPLATE, tool_call_parser="hermes")


def item(text: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "custom_tool_call", "status": status, "name": "patch", "input": text}


@pytest.mark.parametrize("format_", FORMATS)
async def test_a_call_is_a_text(format_: str) -> None:
    script = says(*[f"Now.{call()}"] * 2)
    async with served(script) as edge:
        status, answer, _ = await edge.post(URL, asked(format_))
        events = await events_of(edge, asked(format_))
    assert status == 200, answer
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
    async with served(says("a", "a")) as edge:
        for format_ in ("none", "lark"):
            _, counted, _ = await edge.post(f"{URL}/input_tokens", asked(format_))
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
    script = says(call())
    async with served(script) as edge:
        status, answer, _ = await edge.post(URL, asked("none", tool_choice=choice))
    assert status == 200, answer
    assert without_ids(answer)["output"] == [item(PATCH)]
    (request,) = script.requests
    assert request.grammar is not None
    assert request.grammar.kind is GrammarKind.LARK


async def test_functions_and_custom_tools_mix() -> None:
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    text = f"{call({'a': 1}, 'add')}\n{call()}"
    body = asked("none") | {"tools": [add, tool()]}
    async with served(says(text, text)) as edge:
        _, answer, _ = await edge.post(URL, body)
        events = await events_of(edge, body)
    assert [one["type"] for one in answer["output"]] == ["function_call", "custom_tool_call"]
    assert without_ids(response_of(events)) == without_ids(answer)


@pytest.mark.parametrize("arguments", [{"patch": "a"}, {}, {"input": 1}])
async def test_arguments_of_another_shape_are_the_input_as_they_are(arguments: Any) -> None:
    async with served(says(call(arguments))) as edge:
        _, answer, _ = await edge.post(URL, asked("none"))
    assert without_ids(answer)["output"] == [item(json.dumps(arguments))]


async def test_a_call_that_is_cut_is_incomplete() -> None:
    text = call()[:-30]
    limit = {"max_output_tokens": len(BYTES.encode(text))}
    async with served(says(text, text)) as edge:
        _, answer, _ = await edge.post(URL, asked("none", **limit))
        events = await events_of(edge, asked("none", **limit))
    (called,) = without_ids(answer)["output"]
    assert called["status"] == "incomplete"
    assert PATCH.startswith(called["input"])
    assert without_ids(response_of(events)) == without_ids(answer)


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
    async with served(says("a")) as edge:
        for stream in (False, True):
            body = {"input": "hello", "tools": [tool() | {"format": given}], "stream": stream}
            status, answer, _ = await edge.post(URL, body)
            assert status == 422
            assert said in answer["error"]["message"], answer
    assert edge.batcher.requests == []
