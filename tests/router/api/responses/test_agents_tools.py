"""The tools that agents offer besides functions: in namespaces, of OpenAI's servers, and how they are reported."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_testing.router.edge import limits_with, serving
from millrace_testing.router.responses import URL, events_of, response_of
from millrace_testing.text.texts import Generations, tokenizer

BYTES = tokenizer("byte_level")
WIDE = limits_with(max_input_tokens=400, max_total_tokens=900)
TEMPLATE = (
    "{{ tools | tojson }}{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}"
)
ASKED: dict[str, Any] = {"model": "gpt", "input": "hello"}
IGNORED = "x-millrace-ignored"
ADD = {"type": "function", "name": "add", "description": None, "parameters": None, "strict": False}
FOREIGN: list[dict[str, Any]] = [
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
NAMES = ", ".join(f"tools.{tool['type']}" for tool in FOREIGN)
CALL = '<tool_call>\n{"name": "%s", "arguments": {"a": 1}}\n</tool_call>'


def says(*texts: str) -> Generations:
    """A script that says each text to one request after the other, and ends."""
    return Generations(*([*BYTES.encode(text), 0] for text in texts), tokenizer=BYTES)


def served(script: Any, **options: Any) -> Any:
    usual = {"limits": WIDE, "template": TEMPLATE, "tool_call_parser": "hermes"}
    return serving(script, **usual | options)


@pytest.mark.parametrize("is_strict", [False, True], ids=["usual", "strict_fields"])
async def test_tools_of_other_types_are_left_out_and_named(is_strict: bool) -> None:
    async with served(says("a", "a"), strict_fields=is_strict) as edge:
        status, answer, response = await edge.post(URL, ASKED | {"tools": [*FOREIGN, ADD]})
        assert (status, response.headers[IGNORED]) == (200, NAMES)
        _, alone, response = await edge.post(URL, ASKED | {"tools": [ADD]})
        assert IGNORED not in response.headers
    assert answer["tools"] == alone["tools"] == [ADD]
    assert answer["usage"] == alone["usage"]


async def test_a_choice_among_tools_is_one_among_those_that_are_left() -> None:
    searching = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    async with served(says("a")) as edge:
        status, *_ = await edge.post(URL, ASKED | {"tools": FOREIGN, "tool_choice": searching})
        assert status == 200
        for choice in (searching | {"mode": "required"}, {"type": "web_search"}, "required"):
            body = ASKED | {"tools": FOREIGN, "tool_choice": choice}
            status, answer, _ = await edge.post(URL, body)
            assert status == 422, answer


async def test_items_without_a_text_are_named() -> None:
    items = [
        {"role": "user", "content": "hello"},
        {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "q"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    ]
    async with served(says("a", "a")) as edge:
        _, _, response = await edge.post(URL, ASKED | {"input": items})
        assert response.headers[IGNORED] == "input.web_search_call, input.reasoning"
        verbose = {"text": {"verbosity": "high"}, "client_metadata": {"a": "b"}}
        _, _, response = await edge.post(URL, ASKED | verbose)
        assert response.headers[IGNORED] == "text.verbosity"


async def test_tools_in_a_namespace_are_called_by_both_names() -> None:
    space = {
        "type": "namespace",
        "name": "agents",
        "description": "d",
        "tools": [ADD | {"description": "x"}, {"type": "web_search"}],
    }
    asked = ASKED | {"tools": [space, ADD]}
    texts = [CALL % "agents__add", CALL % "add"]
    async with served(says(*texts, *texts)) as edge:
        for namespace in ("agents", None):
            _, answer, response = await edge.post(URL, asked)
            (call,) = answer["output"]
            assert (call["name"], call.get("namespace")) == ("add", namespace)
            assert response.headers[IGNORED] == "tools.web_search"
            assert answer["tools"][0] == space | {"tools": space["tools"][:1]}
        for namespace in ("agents", None):
            (call,) = response_of(await events_of(edge, asked))["output"]
            assert (call["name"], call.get("namespace")) == ("add", namespace)


async def test_a_tool_in_a_namespace_can_be_chosen() -> None:
    space = {"type": "namespace", "name": "agents", "tools": [ADD]}
    choice = {"type": "function", "name": "add", "namespace": "agents"}
    script = says(CALL % "agents__add")
    async with served(script) as edge:
        body = ASKED | {"tools": [space], "tool_choice": choice}
        status, answer, _ = await edge.post(URL, body)
        assert status == 200, answer
        assert answer["tool_choice"] == choice
        status, answer, _ = await edge.post(
            URL, body | {"tool_choice": choice | {"namespace": "x"}}
        )
        assert status == 422
    assert script.requests[0].grammar is not None


async def test_items_may_bring_tools() -> None:
    item = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [*FOREIGN, ADD]}
    items = [item, {"role": "user", "content": "hello"}]
    async with served(says(*[CALL % "add"] * 2)) as edge:
        _, answer, response = await edge.post(URL, ASKED | {"input": items})
        _, same, _ = await edge.post(URL, ASKED | {"tools": [ADD]})
    assert response.headers[IGNORED] == NAMES
    assert answer["output"][0]["name"] == "add"
    assert answer["usage"] == same["usage"]
