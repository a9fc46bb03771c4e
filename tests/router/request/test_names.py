"""Names of streams: what follows from them, and for whom; and answers that equal each other under one name."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from millrace_router.errors import ValidationError
from millrace_router.request.names import FORM, STREAM_HEADER, Names, new_stream
from millrace_router.request.request import Task, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import LIMITS, Edge, limits_with, pooling_of, serving
from millrace_testing.text.texts import saying

STREAM = "1700000000-00112233445566778899aabbccddeeff"
OTHER = "1700000001-00112233445566778899aabbccddeeff"
TEMPLATE = (
    "{{ 'a' if strftime_now('%Y') == '2023' else 'b' }} {% if tools %}<tool_call>{% endif %}"
    "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
)
CALL = 'Well.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"zone": {"type": "string"}}}
TURN = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "clock", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
PARAMETERS = {"do_sample": True, "details": True, "max_new_tokens": 50}
ROUTES: dict[str, dict[str, Any]] = {
    "/generate": {"inputs": "hello", "parameters": PARAMETERS},
    "/generate_stream": {"inputs": "hello", "parameters": PARAMETERS},
    "/": {"inputs": "hello", "parameters": PARAMETERS},
    "/v1/completions": {"prompt": ["hello", "world"], "n": 2, "temperature": 1.0},
    "/v1/chat/completions": {"messages": TURN, "tools": TOOLS, "n": 2},
    "/v1/responses": {
        "input": "hello",
        "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "free"}],
    },
    "/v1/messages": {
        "messages": TURN,
        "max_tokens": 100,
        "tools": [{"name": "clock", "input_schema": SCHEMA}],
    },
    "/invocations": {"messages": TURN, "tools": TOOLS},
    "/vertex": {"instances": [{"messages": TURN, "tools": TOOLS}, {"inputs": "hello"}]},
    "/v2/models/m/infer": {"inputs": [{"name": "t", "data": ["hello", "world"]}]},
}
WHOLE = {"/generate_stream"}
"""Routes without answers in one piece."""
PIECE = {"/generate", "/vertex", "/v2/models/m/infer"}
"""Routes without streams."""


def served() -> Any:
    """A server whose answers show their seed, and call a tool."""
    limits = limits_with(max_input_tokens=1000, max_total_tokens=2000)
    return serving(plays_with_seed, limits=limits, template=TEMPLATE)


def plays_with_seed(request: ValidRequest, stream: TokenStream) -> None:
    saying(f"{request.sampling.seed} {CALL}")(request, stream)


async def body_of(edge: Edge, path: str, *, stream: bool, **headers: str) -> tuple[str, str]:
    """The whole body of an answer, and the name that its header has."""
    sent = {**ROUTES[path], **({"stream": True} if stream else {})}
    async with edge.client.post(edge.url + path, json=sent, headers=headers) as response:
        text = await response.text()
        assert response.status == 200, text
        return text, response.headers[STREAM_HEADER]


def without_end(body: str) -> list[str]:
    """The events of a body, in no order, as choices are interleaved by chance; without the clock's time of its end."""
    return sorted(re.sub('"completed_at":[0-9]+', "", body).split("\n\n"))


CASES = [(path, False) for path in ROUTES if path not in WHOLE] + [
    (path, True) for path in ROUTES if path not in PIECE
]


@pytest.mark.parametrize(("path", "stream"), CASES)
async def test_the_same_request_with_the_same_name_has_the_same_bytes(
    path: str,
    stream: bool,
) -> None:
    named = {STREAM_HEADER: STREAM}
    async with served() as edge:
        first, again = [await body_of(edge, path, stream=stream, **named) for _ in range(2)]
        others = [
            await body_of(edge, path, stream=stream, **{STREAM_HEADER: OTHER}),
            await body_of(edge, path, stream=stream, **named, **{"x-tenant": "another"}),
            await body_of(edge, path, stream=stream),
            await body_of(edge, path, stream=stream),
        ]
    assert without_end(first[0]) == without_end(again[0])
    assert first[1] == STREAM
    assert len({"".join(without_end(text)) for text, _ in (first, *others)}) == 5
    assert all(FORM.fullmatch(name) for _, name in others)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_an_answer_has_no_id_twice(path: str) -> None:
    async with served() as edge:
        text, _ = await body_of(edge, path, stream=False, **{STREAM_HEADER: STREAM})
    ids = re.findall('"(?:id|call_id)":"([^"]+)"', text)
    assert len(set(ids)) == len(ids) >= 2


async def test_pooled_answers_have_names_too() -> None:
    pooling = pooling_of(Task.SCORE)
    bodies = {
        "/rerank": {"query": "a", "documents": ["b"]},
        "/score": {"text_1": "a", "text_2": "b"},
    }
    async with serving(pooling=pooling) as edge:
        for path, body in bodies.items():
            one, same = [await edge.answer(path, body, **{STREAM_HEADER: STREAM}) for _ in range(2)]
            assert one == same
            assert one["id"] != (await edge.answer(path, body))["id"]


async def test_a_prompt_shows_the_time_of_its_name() -> None:
    async with served() as edge:
        await body_of(edge, "/v1/chat/completions", stream=False, **{STREAM_HEADER: STREAM})
        inputs = [request.input_ids for request in edge.batcher.requests]
        await body_of(
            edge, "/v1/chat/completions", stream=False, **{STREAM_HEADER: "0" + STREAM[1:]}
        )
        old = [request.input_ids for request in edge.batcher.requests[len(inputs) :]]
    assert inputs != old


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "1-2",
        STREAM.upper(),
        f"{STREAM}0",
        f" {STREAM[1:]}",
        STREAM.replace("-", "_"),
        "-" + STREAM[1:],
    ],
)
async def test_a_name_of_another_form_is_refused(name: str) -> None:
    async with served() as edge:
        for path, body in (*ROUTES.items(), ("/v2/models/m/infer", {"inputs": []})):
            status, answer, _ = await edge.post(path, body, headers={STREAM_HEADER: name})
            assert status in {400, 422}, path
            assert STREAM_HEADER in json.dumps(answer), path
        assert edge.batcher.requests == []


async def test_a_response_of_the_same_name_is_stored_once() -> None:
    async with serving(
        saying("a", "a"), limits=LIMITS, template="{{ messages[0].content }}", responses_store=1
    ) as edge:
        body = {"input": "a", "max_output_tokens": 4}
        one, same = [
            await edge.answer("/v1/responses", body, **{STREAM_HEADER: STREAM}) for _ in range(2)
        ]
        assert one["id"] == same["id"]
        status, _, _ = await edge.get(f"/v1/responses/{one['id']}")
        assert status == 200


def test_a_new_name_has_the_form_of_a_name() -> None:
    assert FORM.fullmatch(new_stream())
    assert abs(Names.new().created - time.time()) < 60
    assert Names.of_caller(STREAM, b"").created == 1_700_000_000


def test_names_differ_by_stream_caller_part_kind_and_number() -> None:
    names = Names.of_caller(STREAM, b"a")
    made = [
        names.digits("x", 12),
        names.digits("x", 12, 1),
        names.digits("y", 12),
        names.part(1).digits("x", 12),
        names.part(2).digits("x", 12),
        names.part(1).part(2).digits("x", 12),
        Names.of_caller(STREAM, b"b").digits("x", 12),
        Names.of_caller(OTHER, b"a").digits("x", 12),
    ]
    assert len(set(made)) == len(made)
    assert names.part(0) is names
    assert Names(STREAM, names.key).digits("x", 12) == made[0]


def test_ids_of_calls_have_the_forms_of_their_models() -> None:
    names = Names.of_caller(STREAM, b"")
    assert all(re.fullmatch("call_[0-9a-f]{24}", names.call_id(number)) for number in range(9))
    shorts = [names.short_call_id(number) for number in range(200)]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", short) for short in shorts)
    assert len(set(shorts)) == 200
    assert len(set("".join(shorts))) == 62
    assert 0 <= names.seed() < 2**64


def test_a_name_is_of_a_fixed_form() -> None:
    with pytest.raises(ValidationError, match=f"`{STREAM_HEADER}` must be 10 digits"):
        Names.of_caller(STREAM.replace("1", "\u0661"), b"")
