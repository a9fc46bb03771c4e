"""Grammars are read the same on the event loop, where they are small, and in a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.errors import RouterError
from millrace_router.request.grammar import MAX_PARTS, MAX_SOURCE_BYTES, GrammarType
from millrace_router.request.parameters import GenerateParameters
from millrace_router.request.request import Grammar, GrammarKind
from millrace_router.tool_calls.formats import format_of
from millrace_router.tool_calls.grammar import chat_grammar
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_router.validation.grammar_reader import LARGE_BYTES, GrammarReader
from millrace_testing.router.edge import serving

PADDING = "x" * LARGE_BYTES
SCHEMA: dict[str, Any] = {"properties": {"a": {"enum": ["ü{", None, 0.1, 10**18]}}}
LARGE = SCHEMA | {"description": PADDING}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
REQUIRED, AUTO = ToolChoice("required"), ToolChoice("auto")
ANSWER = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"integer"}')
Outcome = Grammar | None | tuple[type[RouterError], str]


@pytest.fixture(scope="module")
def reader() -> GrammarReader:
    return GrammarReader()


def grammar_of(value: object) -> GrammarType:
    grammar = GenerateParameters.model_validate({"grammar": value}).grammar
    assert grammar is not None
    return grammar


def tool(name: str, pad: str) -> Tool:
    return Tool(name, "d", {**SCHEMA, "description": pad}, strict=False)


def nested(num_levels: int) -> Any:
    value: Any = {}
    for _ in range(num_levels - 1):
        value = {"items": value}
    return value


def here(read: Callable[[], Grammar | None]) -> Outcome:
    try:
        return read()
    except RouterError as error:
        return type(error), str(error)


async def there(reading: Awaitable[Grammar | None]) -> Outcome:
    try:
        return await reading
    except RouterError as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": LARGE},
        {"type": "json", "value": orjson.dumps(LARGE, option=orjson.OPT_INDENT_2).decode()},
        {"type": "json_object", "value": LARGE},
        {"type": "json_object"},
        {"type": "json_schema", "value": {"name": "n", "schema": LARGE}},
        {"type": "json_schema", "value": {"schema": None}},
        {"type": "json", "value": LARGE | nested(128)},
        {"type": "json", "value": LARGE | nested(129)},
        {"type": "json", "value": orjson.dumps(LARGE | nested(129)).decode()},
        {"type": "json", "value": {"const": "{" * (MAX_PARTS + 1)}},
        {"type": "json", "value": orjson.dumps({"const": "{" * (MAX_PARTS + 1)}).decode()},
        {"type": "json", "value": {"const": "x" * MAX_SOURCE_BYTES}},
        {"type": "json", "value": "x" * (MAX_SOURCE_BYTES + 1)},
        {"type": "json", "value": PADDING},
        {"type": "json", "value": f'"{PADDING}"'},
        {"type": "json", "value": f'{{"a":"{PADDING}"'},
        {"type": "json", "value": [PADDING]},
        {"type": "json", "value": None},
        {"type": "regex", "value": f"a|{PADDING}"},
        {"type": "regex", "value": "(" * 129 + PADDING},
        {"type": "lark", "value": f'start: "{PADDING}"'},
        {"type": "ebnf", "value": "ü" * MAX_SOURCE_BYTES},
    ],
)
async def test_a_grammar_is_read_the_same_here_and_there(
    reader: GrammarReader, value: dict[str, Any]
) -> None:
    grammar = grammar_of(value)
    assert await there(reader.read(grammar)) == here(grammar.resolved)


WORDS = st.sampled_from(["properties", "items", "anyOf", "oneOf", "$defs", "type", "ü"]) | st.text()
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(WORDS, parts, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200)
@given(st.dictionaries(WORDS, JSON, max_size=6))
def test_any_schema_is_read_the_same_here_and_there(
    reader: GrammarReader, schema: dict[str, Any]
) -> None:
    async def check() -> None:
        for value in (schema, schema | {"description": PADDING}):
            for written in (value, orjson.dumps(value).decode()):
                grammar = grammar_of({"type": "json", "value": written})
                assert await reader.read(grammar) == grammar.resolved()

    asyncio.run(check())


@pytest.mark.parametrize("pad", ["", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(
    ("choice", "answer"),
    [
        (REQUIRED, None),
        (AUTO, None),
        (AUTO, ANSWER),
        (ToolChoice("named", "now"), None),
        (ToolChoice("named", "rain"), None),
    ],
)
@pytest.mark.parametrize("name", ["json", "hermes", "llama", "mistral"])
async def test_grammars_of_tools_are_the_same_here_and_there(
    reader: GrammarReader, name: str, choice: ToolChoice, answer: Grammar | None, pad: str
) -> None:
    made = format_of(None, name, special_ids={"<tool_call>": 3})
    for tools in (
        [tool("now", pad), tool("then", pad)],
        [Tool("now", None, {"type": "array", "title": pad}, strict=True)],
        [Tool("now", None, {**nested(130), "title": pad}, strict=False)],
    ):
        expected = here(partial(chat_grammar, made, tools, choice, answer))
        assert await there(reader.of_chat(made, tools, choice, answer)) == expected


@pytest.mark.parametrize("strict_tgi", [False, True])
@pytest.mark.parametrize("pad", ["", PADDING], ids=["small", "large"])
async def test_grammars_of_any_size_over_http(pad: str, *, strict_tgi: bool) -> None:
    def asked(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
        schema = {**schema, "description": pad}
        response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        function = {"name": "f", "parameters": schema}
        return {
            "/generate": {
                "inputs": "a",
                "parameters": {"grammar": {"type": "json", "value": schema}},
            },
            "/v1/completions": {"prompt": "a", "response_format": response_format},
            "/v1/chat/completions": {**CHAT, "response_format": response_format},
            "/v1/estimate": {
                **CHAT,
                "tools": [{"type": "function", "function": function}],
                "tool_choice": "required",
            },
        }

    async with serving(template="a", strict_tgi=strict_tgi) as edge:
        for path, body in asked(SCHEMA).items():
            status, answer, _ = await edge.post(path, body)
            assert status == 200, answer
        deep = {"properties": {}, **nested(129)}
        for path, body in asked(deep).items():
            status, answer, _ = await edge.post(path, body)
            error = answer["error"]
            message = error if isinstance(error, str) else error["message"]
            assert (status, message) == (
                422,
                "Input validation error: grammar is not valid: it must have at most 128 levels. Given: 129",
            )
        bare = {"type": "json", "value": {"description": pad}}
        status, answer, _ = await edge.post(
            "/generate", {"inputs": "a", "parameters": {"grammar": bare}}
        )
        assert status == (422 if strict_tgi else 200)
        assert len(edge.batcher.requests) == (3 if strict_tgi else 4)
