"""No body leads to a 500, and every refusal has an error envelope."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError as ShapeError

from millrace_router.api.body.fields import UINT32_MAX
from millrace_router.api.tgi.request import CompatGenerateRequest, GenerateParameters
from millrace_router.server import bodies
from millrace_router.validation.shape_messages import shape_error
from millrace_testing.router.edge import serving

ROUTES = ("/", "/generate", "/generate_stream", "/tokenize")
JSON = {"content-type": "application/json"}


def complaint(body: object) -> str:
    with pytest.raises(ShapeError) as caught:
        CompatGenerateRequest.model_validate(body)
    message = str(shape_error(caught.value, body))
    prefix = "Failed to deserialize the JSON body into the target type: "
    assert message.startswith(prefix)
    return message.removeprefix(prefix)


@pytest.mark.parametrize(
    ("body", "start"),
    [
        ([], "must be an object"),
        ({}, "inputs: "),
        ({"inputs": 5}, "inputs: "),
        ({"inputs": "a", "stream": "true"}, "stream: "),
        ({"inputs": "a", "parameters": []}, "parameters: "),
        *(
            ({"inputs": "a", "parameters": {name: value}}, f"parameters.{name}: ")
            for name, value in [
                ("top_k", 2.0),
                ("max_new_tokens", UINT32_MAX + 1),
                ("seed", -1),
                ("temperature", "0.5"),
                ("temperature", 1e300),
                ("details", "yes"),
                ("grammar", "json"),
            ]
        ),
        ({"inputs": "a", "parameters": {"stop": ["a", 1, 2]}}, "parameters.stop[1]: "),
    ],
)
def test_the_message_names_the_field(body: object, start: str) -> None:
    assert complaint(body).startswith(start)


def test_integers_are_floats_and_big_ones_integers() -> None:
    parameters = {"temperature": 2, "seed": 2**64 - 1, "max_new_tokens": UINT32_MAX}
    request = CompatGenerateRequest.model_validate({"inputs": "a", "parameters": parameters})
    assert request.parameters.temperature == 2.0
    assert request.parameters.seed == 2**64 - 1
    assert request.parameters.max_new_tokens == UINT32_MAX


@pytest.mark.parametrize("name", ["ignore_eos", "ignore_eos_token"])
def test_the_end_of_sequence_can_be_ignored(name: str) -> None:
    body = {"inputs": "a", "parameters": {name: True}}
    assert CompatGenerateRequest.model_validate(body).parameters.ignore_eos


@pytest.mark.parametrize(
    ("data", "headers", "status", "start"),
    [
        (b"", JSON, 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":"\xff"}', JSON, 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":NaN}', JSON, 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":"\\ud800"}', JSON, 400, "Failed to parse the request body as JSON: "),
        (b"[" * 10_000 + b"]" * 10_000, JSON, 400, "Failed to parse the request body as JSON: "),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, JSON, 400, "Failed to parse"),
        (b"x" * 100_001, JSON, 413, "Failed to buffer the request body: length limit exceeded"),
        (b"{}", {"content-type": "text/json"}, 415, "Expected request with"),
    ],
)
async def test_unreadable_bodies_are_refused(
    data: bytes, headers: dict[str, str], status: int, start: str
) -> None:
    async with serving(payload_limit=100_000) as edge:
        for route in ROUTES:
            answer = await edge.post(route, data=data, headers=headers)
            assert answer[0] == status
            assert answer[1]["error"].startswith(start)
            assert answer[1]["error_type"] == "validation"


BODY = b'{"inputs":"a"}'
BARE = zlib.compressobj(wbits=-zlib.MAX_WBITS)


@pytest.mark.parametrize(
    ("encoding", "data", "status", "start"),
    [
        ("identity", BODY, 200, ""),
        ("gzip", gzip.compress(BODY, mtime=0), 200, ""),
        ("GZIP", gzip.compress(BODY, mtime=0), 200, ""),
        ("deflate", zlib.compress(BODY), 200, ""),
        ("deflate", BARE.compress(BODY) + BARE.flush(), 200, ""),
        ("gzip", b"garbage", 400, "Failed to decompress the request body: "),
        ("gzip", b"", 400, "Failed to decompress the request body: "),
        ("deflate", b"garbage", 400, "Failed to decompress the request body: "),
        ("gzip", gzip.compress(BODY, mtime=0)[:-1], 400, "Failed to decompress the request body: "),
        ("gzip", gzip.compress(b" " * 2000, mtime=0), 413, "Failed to buffer the request body: "),
        ("br", BODY, 415, "`Content-Encoding: br` is not supported"),
        ("zstd", BODY, 415, "`Content-Encoding: zstd` is not supported"),
        ("gzip, gzip", BODY, 415, "`Content-Encoding: gzip, gzip` is not supported"),
    ],
)
async def test_compressed_bodies_are_read_or_refused(
    encoding: str, data: bytes, status: int, start: str
) -> None:
    async with serving(payload_limit=1000) as edge:
        server = edge.runner.server
        assert server is not None
        headers = {**JSON, "content-encoding": encoding}
        answer = await edge.post("/generate", data=data, headers=headers)
        assert answer[0] == status
        if status != 200:
            assert answer[1]["error_type"] == "validation"
            assert answer[1]["error"].startswith(start)
        (connection,) = server.connections
        assert (await edge.post("/generate", data=BODY, headers=JSON))[0] == 200
        assert server.connections == [connection]


@pytest.mark.parametrize(
    "content_type",
    ["application/json; charset=utf-8", "application/vnd.api+json", "Application/JSON"],
)
async def test_json_content_types_are_accepted(content_type: str) -> None:
    async with serving() as edge:
        headers = {"content-type": content_type}
        answer = await edge.post("/generate", data=b'{"inputs":"a"}', headers=headers)
        assert answer[0] == 200


async def hanging() -> AsyncIterator[bytes]:
    yield b'{"inputs":'
    await asyncio.Event().wait()


@pytest.mark.parametrize("more", [{}, {"idempotency-key": "k"}], ids=["plain", "keyed"])
async def test_a_body_that_does_not_end_is_not_waited_for(
    more: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.0)
    async with serving() as edge:
        status, body, _ = await edge.post("/generate", data=hanging(), headers=JSON | more)
        assert edge.services.infer.permits.taken == 0
    assert (status, body["error_type"]) == (408, "validation")
    assert body["error"].startswith("Failed to buffer the request body: it took more than")


async def test_the_loop_runs_between_two_calls_for_large_bodies() -> None:
    async with serving() as edge:
        request = make_mocked_request("POST", "/generate", JSON, app=edge.runner.app)
        bodies.hold_body(request, bytes(2 * bodies.LARGE_BYTES))
        await bodies.receive_json(request)
        loop = asyncio.get_running_loop()
        order: list[str] = []

        def call(name: str) -> None:
            order.append(name)
            loop.call_soon_threadsafe(order.append, f"loop after {name}")

        names = [f"call {number}" for number in range(20)]
        await asyncio.gather(*(bodies.off_loop(request, partial(call, one)) for one in names))
        assert order == [part for one in names for part in (one, f"loop after {one}")]


async def test_the_limit_itself_is_allowed() -> None:
    async with serving(payload_limit=20) as edge:
        body = b'{"inputs":"a"}'
        assert (await edge.post("/generate", data=body.ljust(20), headers=JSON))[0] == 200
        assert (await edge.post("/generate", data=body.ljust(21), headers=JSON))[0] == 413


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**66), 2**66)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a", "hello world", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
PARAMETERS = st.dictionaries(
    st.sampled_from(list(GenerateParameters.model_fields)),
    VALUES | st.integers(-1, 3) | st.floats(-1, 2),
    max_size=5,
)
BODIES = VALUES | st.fixed_dictionaries(
    {"inputs": st.text(max_size=12) | st.sampled_from(["a", "hello a"])},
    optional={"parameters": PARAMETERS | VALUES, "stream": VALUES},
)


async def test_no_body_ends_in_a_500() -> None:
    bodies: list[bytes] = []

    @settings(
        max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(BODIES)
    def gather(body: Any) -> None:
        bodies.append(json.dumps(body).encode())

    gather()
    seen = set()
    async with serving() as edge:
        for number, data in enumerate(bodies):
            route = ROUTES[number % len(ROUTES)]
            status, answer, _ = await edge.post(route, data=data, headers=JSON)
            seen.add(status)
            assert status in {200, 400, 422}, (route, data, answer)
            if status != 200:
                assert answer.keys() == {"error", "error_type"}
        assert edge.services.infer.permits.taken == 0
    assert seen >= {200, 422}
