"""Limits of requests, and the low cost of refusals."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError as ShapeError

from millrace_router.api.body.fields import RequestModel
from millrace_router.api.openai.request import ChatCompletionRequest, CompletionRequest
from millrace_router.api.platforms.kserve import KserveRequest
from millrace_router.api.platforms.vertex import VertexRequest
from millrace_router.api.tgi.request import GenerateRequest
from millrace_router.errors import BodyError, SizeError, TemplateError, ValidationError
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.server.bodies import MAX_CONTAINERS, MAX_DEPTH, check_structure
from millrace_router.telemetry.metrics import Metrics
from millrace_router.text.chat_template import ChatTemplate
from millrace_router.text.tokenizer import Tokenizer
from millrace_router.validation.rules import MAX_STOP_CHARS
from millrace_router.validation.validator import Validator
from millrace_testing.router.edge import LIMITS, grammars_of, serving, word_tokenizer
from millrace_testing.text.texts import byte_level, tokenizer

TWO_MB = 2_000_000


def depth_and_count(value: object) -> tuple[int, int]:
    """Levels and number of arrays and objects, by walking what was parsed."""
    if not isinstance(value, dict | list):
        return 0, 0
    inside = [depth_and_count(v) for v in (value.values() if isinstance(value, dict) else value)]
    return 1 + max((d for d, _ in inside), default=0), 1 + sum(n for _, n in inside)


def nested(value: object, depth: int) -> object:
    for level in range(depth):
        value = [value] if level % 2 else {'b"[{\\': value}
    return value


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('[]{}"\\ax,:')),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.sampled_from('[{"\\a')), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(JSON, st.integers(min_value=185, max_value=205), st.booleans())
def test_levels_are_those_of_the_json_whatever_its_strings_hold(
    value: object, more: int, escaped: bool
) -> None:
    value = nested(value, more)
    body = json.dumps(value, ensure_ascii=escaped).encode()
    if depth_and_count(value)[0] > MAX_DEPTH:
        with pytest.raises(BodyError, match="more than 200 levels deep"):
            check_structure(body)
    else:
        check_structure(body)


def test_containers_are_counted_and_brackets_in_strings_are_not() -> None:
    check_structure(json.dumps(["[{" * 100_000, *[[]] * (MAX_CONTAINERS - 1)]).encode())
    with pytest.raises(BodyError, match="more than 20000 arrays and objects"):
        check_structure(json.dumps([*[{}] * MAX_CONTAINERS]).encode())


@pytest.mark.parametrize(
    "body", [b"[" * TWO_MB, b'{"a":' * 400_000, b'"' + b"[" * TWO_MB, b"]" * 999 + b"[" * 999]
)
def test_malformed_json_is_left_to_the_parser_or_refused(body: bytes) -> None:
    try:
        check_structure(body)
    except BodyError:
        return
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(body)


@pytest.mark.parametrize(
    "literal",
    ["1e400", "-1e400", "9" * 400, "NaN", "Infinity", '"\\ud800"', '"\\udc00\\ud800"', "01", "1_0"],
)
def test_numbers_and_texts_that_are_none_are_no_json(literal: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(literal)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerateRequest, lambda bad: {"inputs": "x", "parameters": {"stop": bad}}),
        (ChatCompletionRequest, lambda bad: {"messages": bad}),
        (ChatCompletionRequest, lambda bad: {"messages": [{"role": "user", "content": bad}]}),
        (ChatCompletionRequest, lambda bad: {"messages": [{"role": "user", "tool_calls": bad}]}),
        (ChatCompletionRequest, lambda bad: {**CHAT, "tools": bad}),
        (ChatCompletionRequest, lambda bad: {**CHAT, "stop": bad}),
        (CompletionRequest, lambda bad: {"prompt": ["x"], "stop": bad}),
    ],
)
def test_of_a_million_mistakes_one_is_looked_at(
    model: type[RequestModel], body: Callable[[list[object]], object]
) -> None:
    with pytest.raises(ShapeError) as refused:
        model.model_validate(body([1] * 1_000_000))
    # One for each kind of value that the field takes.
    assert refused.value.error_count() <= 2


def test_no_list_of_a_body_collects_mistakes() -> None:
    """Whatever field is added, a list in it fails at its first bad item."""
    models: tuple[type[RequestModel], ...] = (
        *(GenerateRequest, ChatCompletionRequest, CompletionRequest),
        *(VertexRequest, KserveRequest),
    )
    for model in models:
        assert _slow_lists(model.__pydantic_core_schema__) == []


def _slow_lists(schema: object, path: str = "") -> list[str]:
    """Places of a pydantic core schema that hold lists, or objects, of checked items without `fail_fast`."""
    found = []
    if isinstance(schema, dict):
        kind = schema.get("type")
        items = schema.get("items_schema") or schema.get("values_schema")
        checked = isinstance(items, dict) and items.get("type") != "any"
        if kind in ("list", "dict") and checked and not schema.get("fail_fast"):
            found.append(path)
        for key, value in schema.items():
            found += _slow_lists(value, f"{path}.{key}")
    elif isinstance(schema, list | tuple):
        for index, value in enumerate(schema):
            found += _slow_lists(value, f"{path}[{index}]")
    return found


def validator(of: Tokenizer) -> Validator:
    metrics = Metrics(max_input_tokens=8, max_total_tokens=16)
    return Validator(of, LIMITS, metrics, grammars_of())


async def check(of: Tokenizer, inputs: str, **parameters: Any) -> None:
    asked = GenerationRequest(prompt=inputs, max_new_tokens=1, **parameters)
    await validator(of).check(asked)


class Untouched(Tokenizer):
    """A tokenizer that fails if it is called."""

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        raise AssertionError("the text was tokenized")


def untouched() -> Untouched:
    return Untouched(byte_level(), validation_workers=1)


@pytest.mark.parametrize("text", ["a" * TWO_MB, "日" * 600_000, " " * TWO_MB])
async def test_what_cannot_fit_is_refused_without_tokenizing_it(text: str) -> None:
    of = untouched()
    with pytest.raises(SizeError, match=r"must have less than 8 tokens\. Given: at least") as e:
        await check(of, text)
    real = len(tokenizer("byte_level").encode(text))
    assert 8 < e.value.num_prompt_tokens <= real


async def test_what_may_fit_is_tokenized() -> None:
    of = tokenizer("byte_level")
    assert of.longest_token is not None
    bound = LIMITS.max_input_tokens * of.longest_token
    with pytest.raises(AssertionError, match="was tokenized"):
        await check(untouched(), "x" * bound)
    with pytest.raises(AssertionError, match="was tokenized"):
        await check(untouched(), "x" * TWO_MB, truncate=4)
    # One unknown word is one token, however long it is.
    await check(word_tokenizer(), "x" * TWO_MB)


async def test_stop_sequences_have_a_greatest_length() -> None:
    await check(word_tokenizer(), "a", stop=["s" * MAX_STOP_CHARS])
    with pytest.raises(ValidationError, match=r"at most 4096 characters\. Given: 4097"):
        await check(word_tokenizer(), "a", stop=["x", "s" * (MAX_STOP_CHARS + 1)])


def test_indented_json_does_not_grow_without_bound() -> None:
    """In a template of Llama 3.1's kind, two megabytes of the client's would become 800."""
    template = ChatTemplate("{{ custom | tojson(indent=4) }}", special_tokens={})
    deep = nested([1] * 500_000, 190)
    with pytest.raises(TemplateError, match="characters of indented JSON"):
        template.render([{"role": "user", "content": "x"}], variables={"custom": deep})
    # Without indentation it is as long as it came.
    plain = ChatTemplate("{{ custom | tojson }}", special_tokens={})
    assert json.loads(plain.render([], variables={"custom": deep})) == deep


@pytest.mark.parametrize("name", ["tools", "variables"])
async def test_what_a_template_is_given_beside_messages_counts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    template = ChatTemplate("{{ strftime_now('x') }}", special_tokens={})

    def render(*_: object, **__: object) -> str:
        seen.append(threading.get_ident())
        return "prompt"

    monkeypatch.setattr(template, "render", render)
    large = {"x": ["y"] * 20_000}
    given: dict[str, Any] = {name: [large] if name == "tools" else large}
    await template.render_async([{"role": "user", "content": "x"}], **given)
    await template.render_async([{"role": "user", "content": "x"}])
    assert seen[0] != threading.get_ident() == seen[1]


@pytest.mark.parametrize(
    "head",
    [
        b"x: " + b"a" * 100_000,
        b"a" * 100_000 + b": x",
        b"\r\n".join(b"x%d: y" % i for i in range(9999)),
    ],
    ids=["value", "name", "number"],
)
async def test_headers_have_bounds_too(head: bytes) -> None:
    async with serving() as edge:
        host, port = edge.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        assert (await edge.get("/health"))[0] == 200


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/chat/completions", "/v1/completions", "/tokenize"]
)
async def test_each_route_refuses_with_a_type(path: str) -> None:
    deep = b"[" * 150 + b"]" * 150
    many = b'{"x":[' + b",".join([deep] * 500) + b"]}"
    async with serving() as edge:
        sent = {"data": many, "headers": {"content-type": "application/json"}}
        status, answer, _ = await edge.post(path, **sent)
        assert status == 400
        assert b"more than 20000 arrays and objects" in orjson.dumps(answer)
        assert edge.services.infer.permits.taken == 0
        assert (await edge.get("/health"))[0] == 200
