"""TGI's own routes over real sockets: bodies, headers, bytes of streams."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.text.tokenizer import SPANS_AT_ONCE, Tokenizer, TokenSpan
from millrace_testing.router.edge import echo, finished, limits_with, play, serving, token_event

ASKED = {"inputs": "hello world", "parameters": {"max_new_tokens": 2}}


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hello world", "parameters": {"max_new_tokens": 2, **parameters}}


def with_cached(num_cached: int, predicted: float | None = None) -> Any:
    """A script whose prompts are found computed so far, and were expected to wait so long."""

    def script(request: ValidRequest, stream: TokenStream) -> None:
        stream.cached_tokens, stream.predicted_queue_seconds = num_cached, predicted
        echo(request, stream)

    return script


async def test_details_have_cached_tokens() -> None:
    async with serving(with_cached(16)) as edge:
        _, body, response = await edge.post("/generate", with_parameters(details=True))
        assert body["details"]["cached_tokens"] == 16
        assert response.headers["x-cached-tokens"] == "16"
        sampled = with_parameters(details=True, best_of=2, do_sample=True)
        _, body, _ = await edge.post("/generate", sampled)
        assert body["details"]["best_of_sequences"][0]["cached_tokens"] == 16
        _, text, response = await edge.post("/generate_stream", with_parameters(details=True))
    last = json.loads(text.removesuffix("\n\n").split("\n\n")[-1][6:])
    assert last["details"]["cached_tokens"] == 16
    assert "x-cached-tokens" not in response.headers


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_an_image_in_the_text_is_named_in_the_header_and_in_the_log(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(echo) as edge:
        for inputs, ignored in (
            ("What is ![](https://example.com/a.png)?", "inputs.image"),
            ("![a cat](data:image/png;base64,AAAA)", "inputs.image"),
            ("![not an address](here), and [a link](https://example.com)", None),
        ):
            asked = {"inputs": inputs, "parameters": {"max_new_tokens": 2}}
            status, _, response = await edge.post(path, asked)
            assert status == 200
            assert response.headers.get("x-millrace-ignored") == ignored
    assert capsys.readouterr().out.count("inputs.image") == 1


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_an_answered_request_is_freed_without_the_collector(path: str) -> None:
    async with serving() as edge:
        await edge.post(path, ASKED)
        stream = weakref.ref(edge.batcher.streams.pop())
        await edge.get("/health")
        assert stream() is None


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_the_predicted_queue_time_is_a_header_where_there_is_one(path: str) -> None:
    async with serving(with_cached(0, predicted=1.2345)) as edge:
        _, _, response = await edge.post(path, ASKED)
        assert response.headers["x-predicted-queue-time"] == "1234"
        edge.batcher.script = with_cached(0)
        _, _, response = await edge.post(path, ASKED)
        assert "x-predicted-queue-time" not in response.headers


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_terms_come_from_headers_and_body(path: str) -> None:
    headers = {"x-priority": "-3", "x-max-queue-ms": "1500", "x-tenant": "me"}
    async with serving(fairness="tenant") as edge:
        await edge.post(path, ASKED, headers=headers)
        await edge.post(path, with_parameters(priority=7), headers=headers)
        await edge.post(path, ASKED)
        assert [request.scheduling for request in edge.batcher.requests] == [
            SchedulingParameters(priority=-3, tenant="me", max_queue_seconds=1.5),
            SchedulingParameters(priority=7, tenant="me", max_queue_seconds=1.5),
            SchedulingParameters(),
        ]
    async with serving(max_queue_wait=2.0) as edge:
        await edge.post(path, ASKED, headers=headers)
        await edge.post(path, ASKED)
        assert [request.scheduling for request in edge.batcher.requests] == [
            SchedulingParameters(priority=-3, max_queue_seconds=1.5),
            SchedulingParameters(max_queue_seconds=2.0),
        ]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
@pytest.mark.parametrize(
    ("headers", "parameters", "message"),
    [
        ({"x-priority": "11"}, {}, "`x-priority` must be an integer from -10 to 10. Given: 11"),
        ({}, {"priority": -11}, "`priority` must be an integer from -10 to 10. Given: -11"),
        (
            {"x-max-queue-ms": "0"},
            {},
            "`x-max-queue-ms` must be a positive integer of milliseconds. Given: 0",
        ),
    ],
)
async def test_wrong_terms_are_refused_and_counted(
    path: str, headers: dict[str, str], parameters: dict[str, int], message: str
) -> None:
    async with serving() as edge:
        status, body, _ = await edge.post(path, with_parameters(**parameters), headers=headers)
        assert status == 422
        assert body == {"error": f"Input validation error: {message}", "error_type": "validation"}
        assert edge.services.infer.permits.taken == 0
        assert edge.batcher.requests == []
        lines = await edge.exposition()
        assert "tgi_request_count 1" in lines
        assert 'tgi_request_failure{err="validation"} 1' in lines


async def test_a_priority_of_another_type_is_refused() -> None:
    async with serving() as edge:
        for value in ("1", 1.5, True):
            status, body, _ = await edge.post("/generate", with_parameters(priority=value))
            assert (status, body["error_type"]) == (422, "validation")
            assert "parameters.priority" in body["error"]


async def test_a_token_is_sent_before_the_next_is_there() -> None:
    async with serving(None) as edge, asyncio.TaskGroup() as group:
        posting = group.create_task(edge.client.post(f"{edge.url}/generate_stream", json=ASKED))
        await edge.batcher.arrived.wait()
        (stream,) = edge.batcher.streams
        stream.token(token_event(1, "a"))
        async with await posting as response:
            line = await response.content.readuntil(b"\n\n")
            assert json.loads(line[6:])["token"]["text"] == "a"
            stream.token(token_event(2, "b", finished=finished("ab", 2)))
            rest = await response.content.read()
        assert json.loads(rest[6:])["generated_text"] == "ab"


async def test_best_of_returns_the_likeliest_and_the_others() -> None:
    logprobs = iter((-2.0, -1.0))

    def script(request: ValidRequest, stream: TokenStream) -> None:
        play(stream, " y", logprob=next(logprobs), seed=request.sampling.seed)

    async with serving(script) as edge:
        asked = with_parameters(best_of=2, do_sample=True, details=True)
        status, body, _ = await edge.post("/generate", asked)
        first, second = (request.sampling.seed for request in edge.batcher.requests)
        lines = await edge.exposition()
        assert edge.services.infer.permits.taken == 0
    assert status == 200
    details = body["details"]
    assert first != second
    assert details["seed"] == second
    assert details["tokens"][0]["logprob"] == -1.0
    (other,) = details["best_of_sequences"]
    assert other["generated_text"] == " y"
    assert other["seed"] == first
    assert "tgi_request_count 1" in lines
    assert "tgi_request_success 1" in lines


async def test_tokenizing_takes_a_permit() -> None:
    async with serving(None, limits=limits_with(max_concurrent_requests=1), template="a") as edge:
        first = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, asked in (("/tokenize", ASKED), ("/chat_tokenize", chat)):
            status, body, _ = await edge.post(path, asked)
            assert (status, body["error_type"]) == (429, "overloaded")
        play(edge.batcher.streams[0], "x")
        await first
        for path, asked in (("/tokenize", ASKED), ("/chat_tokenize", chat)):
            assert (await edge.post(path, asked))[0] == 200
        assert edge.services.infer.permits.taken == 0
        edge.services.infer.drain()
        assert (await edge.post("/tokenize", ASKED))[0] == 503


@pytest.mark.parametrize("path", ["/tokenize", "/chat_tokenize"])
async def test_much_text_is_tokenized_off_the_event_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    sizes: list[int] = []
    encode, dumps = Tokenizer.encode_with_offsets, orjson.dumps

    def watched_encode(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[TokenSpan]:
        threads.add(threading.get_ident())
        return encode(self, text, add_special_tokens=add_special_tokens)

    def watched_dumps(value: Any) -> bytes:
        if isinstance(value, list) and value and isinstance(value[0], TokenSpan):
            threads.add(threading.get_ident())
            sizes.append(len(value))
        return dumps(value)

    monkeypatch.setattr(Tokenizer, "encode_with_offsets", watched_encode)
    monkeypatch.setattr(orjson, "dumps", watched_dumps)
    words = "hello " * 50_000
    chat = {"messages": [{"role": "user", "content": words}]}
    asked = json.dumps({"inputs": words} if path == "/tokenize" else chat).encode()
    headers = {"content-type": "application/json"}
    async with serving(template="{{ messages[0].content }}") as edge:
        posting = asyncio.create_task(edge.post(path, data=io.BytesIO(asked), headers=headers))
        while not posting.done():
            assert (await edge.get("/health"))[0] == 200
        status, body, _ = await posting
    tokens = body if path == "/tokenize" else body["tokenize_response"]
    assert status == 200
    assert len(tokens) == sum(sizes) == 50_000
    assert tokens[-1] == {"id": 2, "text": "hello", "start": 299_994, "stop": 299_999}
    assert threading.get_ident() not in threads
    assert max(sizes) <= SPANS_AT_ONCE
