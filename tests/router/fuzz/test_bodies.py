"""Whatever is posted: a documented status, the envelope of the route, and every permit back."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from http.client import HTTPConnection
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from millrace_router.api.openapi.document import OPERATIONS
from millrace_router.request.request import Task
from millrace_router.server.operation import Operation
from millrace_testing.contract.openapi import (
    EVENTS,
    JSON,
    check_documented,
    described,
    path_of,
    resolved,
)
from millrace_testing.router.edge import Edge, limits_with, pooling_of, serving

SECONDS = 30.0
TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
LIMITS = limits_with(max_input_tokens=20, max_total_tokens=40)
POSTS = [one for one in OPERATIONS if one.method == "post" and not one.is_admin]
ROUTES = {operation.path: operation for operation in POSTS}

PARAMETERS: dict[str, Any] = {
    "best_of": 1,
    "temperature": 0.5,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "top_k": 3,
    "top_p": 0.9,
    "typical_p": 0.9,
    "do_sample": True,
    "max_new_tokens": 3,
    "return_full_text": True,
    "stop": ["x"],
    "truncate": 2,
    "watermark": False,
    "details": True,
    "decoder_input_details": False,
    "seed": 1,
    "top_n_tokens": 2,
    "grammar": {"type": "json", "value": {"type": "object", "properties": {"a": {}}}},
    "min_p": 0.1,
    "min_new_tokens": 1,
    "adapter_id": None,
    "adapter_source": "hub",
    "merged_adapters": None,
    "api_token": None,
    "return_k_alternatives": None,
    "response_format": None,
    "lora_path": "",
    "priority": 1,
    "ignore_eos": False,
}
NATIVE = {"inputs": "hello world", "stream": True, "parameters": PARAMETERS}
OPENAI = {
    "model": "tgi",
    "max_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": -1,
    "stop": ["x"],
    "temperature": 0.0,
    "top_p": 1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.5,
    "n": 2,
    "logit_bias": {"3": 1, "4": -0.5},
    "top_k": 3,
    "typical_p": 0.5,
    "min_p": 0.1,
    "response_format": {"type": "regex", "value": "(a|b)+"},
    "ignore_eos": False,
    "priority": 0,
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
CHAT = OPENAI | {
    "messages": [
        {"role": "user", "content": "hello", "name": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "world", "tool_call_id": "1"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "text", "text": "b"},
            ],
        },
    ],
    "max_completion_tokens": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [],
    "tool_choice": "none",
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}},
    },
    "chat_template_kwargs": {"a": {}},
}
COMPLETION = OPENAI | {"prompt": ["hello", "world"], "suffix": "", "echo": False, "best_of": 2}
RESPONSES = {
    "model": "tgi",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "world"},
    ],
    "instructions": "a",
    "max_output_tokens": 2,
    "stream": True,
    "text": {"format": {"type": "text"}},
    "tools": [],
    "tool_choice": "auto",
    "metadata": {"a": "b"},
}
MESSAGES = {
    "model": "tgi",
    "max_tokens": 2,
    "stream": True,
    "system": [{"type": "text", "text": "a"}],
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": [1]}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "b", "is_error": True},
                {"type": "text", "text": "world"},
            ],
        },
    ],
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 1,
    "tools": [],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "disabled"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "a"},
}
KSERVE = {
    "id": "a",
    "parameters": PARAMETERS,
    "inputs": [{"name": "a", "shape": [2], "datatype": "BYTES", "data": ["hello", "world"]}],
    "outputs": [{"name": "b"}],
}
BODIES: list[dict[str, Any]] = [NATIVE, CHAT, COMPLETION, RESPONSES, MESSAGES, KSERVE]
BODIES_BY_PATH: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/chat_tokenize": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v2/models/{model_name}/infer": KSERVE,
}

HUGE = st.sampled_from(
    [2**31, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**40, 1e308, -1e-320]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 20)
    | HUGE
    | st.floats()
    | st.text(st.characters(), max_size=12)
    | st.sampled_from(["", "\ud800", "\0", "hello", "user", "text", "none", "1"])
)
KEYS = st.sampled_from(["inputs", "messages", "prompt", "parameters", "stream", "role", "content"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)


Headers = dict[str, str | bytes]


class Door:
    """One server for all examples, on a loop of its own."""

    def __init__(self, runner: asyncio.Runner, edge: Edge) -> None:
        self._runner = runner
        self._edge = edge
        self._address = edge.url.removeprefix("http://")

    def post(self, path: str, data: bytes, headers: Headers) -> tuple[int, str, bytes]:
        """Status, content type and body, once nothing of the request is left in the house."""

        async def post() -> tuple[int, str, bytes]:
            async with asyncio.timeout(SECONDS):
                answer = await asyncio.to_thread(self._post, path, data, headers)
                await self._edge.services.infer.permits.all_free()
            return answer

        return self._runner.run(post())

    def _post(self, path: str, data: bytes, headers: Headers) -> tuple[int, str, bytes]:
        # aiohttp's client sends no header that is not UTF-8.
        with closing(HTTPConnection(self._address, timeout=SECONDS)) as connection:
            connection.request("POST", path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers.get_content_type(), answer.read()


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        edge = runner.run(stack.enter_async_context(serving(template=TEMPLATE, limits=LIMITS)))
        yield Door(runner, edge)
        runner.run(stack.aclose())


def check(door: Door, operation: Operation, data: bytes, headers: Headers | None = None) -> int:
    """Post, check that the answer is as documented and no failure of ours, return its status."""
    headers = {"content-type": JSON, **(headers or {})}
    status, media_type, body = door.post(path_of(operation), data, headers)
    assert status < 500, body
    check_documented(operation, status, media_type, body)
    assert media_type != EVENTS or b'"error":{' not in body
    return status


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values inside."""
    yield path
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The body with another value at one place."""
    if not path:
        return value
    *above, key = path
    changed = parent = copy.deepcopy(body)
    for step in above:
        parent = parent[step]
    parent[key] = value
    return changed


PLACES = [(body, path) for body in BODIES for path in places(body)]
OPERATION = st.sampled_from(POSTS)
fuzz = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow], derandomize=False
)


def test_unchanged_bodies_are_answered(door: Door) -> None:
    served = {"/generate_stream": NATIVE, "/invocations": CHAT, **BODIES_BY_PATH}
    for path, body in served.items():
        assert check(door, ROUTES[path], json.dumps(body).encode()) == 200, path


@fuzz
@given(operation=OPERATION, data=st.binary(max_size=60))
def test_any_bytes_are_answered_or_refused(door: Door, operation: Operation, data: bytes) -> None:
    # Bytes that happen to be a right body are answered.
    assert check(door, operation, data) in {200, 400, 422}


@fuzz
@given(
    operation=OPERATION,
    data=st.binary(max_size=60),
    encoding=st.sampled_from(["gzip", "deflate", "br", "identity", "gzip, gzip", "\xff"]),
    kind=st.sampled_from([JSON, "text/plain", "application/", "application/x+json", "\xff"]),
)
@example(operation=ROUTES["/generate"], data=b"", encoding="\xff", kind=JSON)
def test_any_bytes_in_any_encoding_are_answered_or_refused(
    door: Door, operation: Operation, data: bytes, encoding: str, kind: str
) -> None:
    headers: Headers = {"content-encoding": encoding, "content-type": kind}
    assert check(door, operation, data, headers) in {200, 400, 415, 422}


@fuzz
@given(operation=OPERATION, value=VALUES)
def test_any_json_is_answered_or_refused(door: Door, operation: Operation, value: Any) -> None:
    check(door, operation, json.dumps(value).encode())


@settings(fuzz, max_examples=600)
@given(operation=OPERATION, place=st.sampled_from(PLACES), value=VALUES)
def test_any_value_in_any_field_of_a_valid_body_is_answered_or_refused(
    door: Door, operation: Operation, place: tuple[Any, tuple[Any, ...]], value: Any
) -> None:
    body, path = place
    check(door, operation, json.dumps(replaced(body, path, value)).encode())


@settings(fuzz, max_examples=100)
@given(operation=OPERATION, place=st.sampled_from(PLACES), depth=st.integers(1, 100_000))
def test_depths_above_200_are_refused_in_any_field(
    door: Door, operation: Operation, place: tuple[Any, tuple[Any, ...]], depth: int
) -> None:
    body, path = place
    for left, right in (("[", "]"), ('{"a":', "}")):
        deep = left * depth + "1" + right * depth
        data = json.dumps(replaced(body, path, "MARK")).replace('"MARK"', deep)
        status = check(door, operation, data.encode())
        assert status != 200 or depth <= 200


@fuzz
@given(operation=OPERATION, text=st.text('[]{}",:\\', max_size=12), count=st.integers(1, 400))
@example(operation=ROUTES["/generate"], text="[", count=300)
def test_text_that_looks_like_json_is_answered_or_refused(
    door: Door, operation: Operation, text: str, count: int
) -> None:
    for body in ({"inputs": text * count}, {"prompt": text * count}, {text: [text] * count}):
        check(door, operation, json.dumps(body).encode())


@fuzz
@given(
    operation=OPERATION,
    body=st.sampled_from(BODIES),
    cut=st.integers(0, 400),
    junk=st.binary(max_size=6),
)
def test_cut_and_spliced_bodies_are_answered_or_refused(
    door: Door, operation: Operation, body: Any, cut: int, junk: bytes
) -> None:
    whole = json.dumps(body).encode()
    check(door, operation, whole[:cut] + junk + whole[cut + len(junk) :])


SCHEDULING = {"priority", "parameters"}
"""Fields of the body that take precedence over a header."""
HEADER = st.binary(max_size=20) | st.integers().map(lambda number: b"%d" % number)
UNPRINTABLE = bytes([*range(32), 127])


@fuzz
@given(
    operation=OPERATION,
    name=st.sampled_from(
        ["x-priority", "x-max-queue-ms", "x-tenant", "last-event-id", "idempotency-key"]
    ),
    value=HEADER.map(lambda value: value.translate(None, UNPRINTABLE)),
)
@example(operation=ROUTES["/generate"], name="x-priority", value=b"\xff")
@example(operation=ROUTES["/v1/chat/completions"], name="x-max-queue-ms", value=b"9" * 5000)
def test_any_header_is_answered_or_refused(
    door: Door, operation: Operation, name: str, value: bytes
) -> None:
    body = BODIES_BY_PATH.get(operation.path, NATIVE)
    data = json.dumps({key: body[key] for key in body.keys() - SCHEDULING}).encode()
    # A stream that is resumed must have a key, and one that has a key may be resumed.
    headers: Headers = {"idempotency-key": str(uuid4())} if name == "last-event-id" else {}
    check(door, operation, data, {**headers, name: value})


WRONG: list[Any] = [
    *([], {}, [[]], [{}], [None], {"type": []}, {"type": {}}, {"a": {"b": []}}, [1, "a"]),
    *(None, True, False, 0, -1, 1.5, 2.0, 2**31, 2**64, -(2**63) - 1, 1e308),
    *("", "a", "1", "\0", "\ud7ff", "[", "{}", "x" * 300),
]
ANYTHING: list[Any] = [
    *(None, True, 3, -0.5, "a", [], {}, [{"a": [1]}], {"a": {"b": "c"}}, {"type": "any"}),
    *({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},),
    *({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/b"}], "$defs": {"b": {"enum": [1]}}},),
]
DECIDING = frozenset({"type", "role", "inputs", "messages", "input", "content", "tool_choice"})
"""Fields by which a reader chooses how it reads others."""
MOST_LEVELS = 7


class Documented:
    """Bodies at random: as the document describes them, or off it by one change."""

    def __init__(self, seed: str) -> None:
        self._random = Random(seed)

    def body(self, operation: Operation, *, is_changed: bool) -> Any:
        body = self._value(described(operation)["requestBody"]["content"][JSON]["schema"], 0)
        if not is_changed:
            return body
        path = self._place(body)
        change = self._random.choice(["replace", "replace", "drop", "add"])
        if change == "replace" or not path:
            return replaced(body, path, self._random.choice(WRONG))
        changed = inner = copy.deepcopy(body)
        for step in path[:-1]:
            inner = inner[step]
        if change == "drop" or isinstance(inner, list):
            del inner[path[-1]]
        else:
            inner[self._random.choice(["type", "schema", "tools", "role", "a"])] = (
                self._random.choice(WRONG)
            )
        return changed

    def _place(self, body: Any) -> tuple[Any, ...]:
        """A place deep inside is as likely as all that are less deep; what decides how others are read, more likely."""
        paths = [*places(body)]
        if (
            deciding := [path for path in paths if path and path[-1] in DECIDING]
        ) and self._random.random() < 0.5:
            return self._random.choice(deciding)
        depth = self._random.choice(sorted({len(path) for path in paths}))
        return self._random.choice([path for path in paths if len(path) == depth])

    def _value(self, schema: Any, depth: int) -> Any:
        if "$ref" in schema:
            return self._value(resolved(schema["$ref"]), depth)
        if "const" in schema or "enum" in schema:
            return self._random.choice(schema.get("enum") or [schema["const"]])
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self._value(self._random.choice(schema[word]), depth)
        if schema.get("type") == "object":
            return self._object(schema, depth)
        if schema.get("type") == "array":
            least = schema.get("minItems", 0)
            count = self._random.randint(least, least + 2 * (depth <= MOST_LEVELS))
            return [self._value(schema.get("items", {}), depth + 1) for _ in range(count)]
        return self._random.choice(self._scalars(schema))

    def _scalars(self, schema: Any) -> list[Any]:
        least, most = schema.get("minimum", -3), schema.get("maximum", 9)
        scalars: dict[str, list[Any]] = {
            "string": ["hello", "world", "auto", "none", "{}", "a" * schema.get("minLength", 0)],
            "integer": [least, most, *([3] if least <= 3 <= most else [])],
            "number": [0.5, 1, 0],
            "boolean": [True, False],
            "null": [None],
        }
        return scalars.get(schema.get("type"), ANYTHING)

    def _object(self, schema: Any, depth: int) -> dict[str, Any]:
        required, share = schema.get("required", ()), 0.0 if depth > MOST_LEVELS else 0.3
        made = {
            name: self._value(one, depth + 1)
            for name, one in schema.get("properties", {}).items()
            if name in required or self._random.random() < share
        }
        others = schema.get("additionalProperties", False)
        if not schema.get("properties") and others is not False:
            value = (
                self._random.choice(ANYTHING) if others is True else self._value(others, depth + 1)
            )
            made |= {"a": value} if not isinstance(value, dict) else value
        return made


@pytest.fixture(scope="module")
def wide_door() -> Iterator[Door]:
    """A server with all tasks, grammars and an adapter's folder."""
    limits = limits_with(grammars=True, prefill_logprobs=True)
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        options: Any = {"template": TEMPLATE, "limits": limits, "pooling": pooling_of(*Task)}
        edge = runner.run(stack.enter_async_context(serving(**options)))
        yield Door(runner, edge)
        runner.run(stack.aclose())


@pytest.mark.parametrize("num_bodies", [20, pytest.param(500, marks=pytest.mark.ecosystem)])
@pytest.mark.parametrize("path", ROUTES)
def test_documented_bodies_and_those_off_by_one_change_are_answered_or_refused(
    wide_door: Door, path: str, num_bodies: int
) -> None:
    documented = Documented(f"{path} {num_bodies}")
    for index in range(num_bodies):
        body = documented.body(ROUTES[path], is_changed=index % 2 == 1)
        try:
            check(wide_door, ROUTES[path], json.dumps(body).encode())
        except BaseException as error:
            error.add_note(f"body: {json.dumps(body)}")
            raise
