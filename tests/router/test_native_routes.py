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

from millrace_fakes_edge import echo, finished, limits_with, play, serving, token_event
from millrace_router.entry import TokenStream
from millrace_router.request import FinishReason, Terms, ValidRequest
from millrace_router.tokenizer import SPANS_AT_ONCE, Tokenizer, TokenSpan

ASKED = {"inputs": "hello world", "parameters": {"max_new_tokens": 2}}


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "hello world", "parameters": {"max_new_tokens": 2, **parameters}}


async def test_generate_answers_the_text_alone() -> None:
    async with serving() as edge:
        status, body, _ = await edge.post("/generate", ASKED)
        assert (status, body) == (200, {"generated_text": " x x"})


async def test_details_tell_of_every_token() -> None:
    async with serving() as edge:
        _, body, _ = await edge.post("/generate", with_parameters(details=True))
    token = {"text": " x", "logprob": -0.5, "special": False}
    assert body["details"] == {
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": None,
        "prefill": [],
        "tokens": [{"id": 1, **token}, {"id": 2, **token}],
        "cached_tokens": 0,
    }


async def test_prefill_is_told_where_the_shards_report_it() -> None:
    asked = with_parameters(decoder_input_details=True)
    async with serving(limits=limits_with(prefill_logprobs=True)) as edge:
        _, body, _ = await edge.post("/generate", asked)
    assert body["details"]["prefill"] == [
        {"id": 2, "text": " hello", "logprob": None},
        {"id": 3, "text": " world", "logprob": -1.0},
    ]
    async with serving() as edge:
        _, body, _ = await edge.post("/generate", asked)
    assert body["details"]["prefill"] == []


async def test_compat_route_answers_a_list_and_repeats_the_prompt() -> None:
    async with serving() as edge:
        assert (await edge.post("/", ASKED))[1] == [{"generated_text": "hello world x x"}]
        asked = with_parameters(return_full_text=False)
        assert (await edge.post("/", asked))[1] == [{"generated_text": " x x"}]
        _, text, response = await edge.post("/", {**ASKED, "stream": True})
    assert response.content_type == "text/event-stream"
    assert json.loads(text.split("\n\n")[1][6:])["generated_text"] == "hello world x x"


@pytest.mark.parametrize(
    ("body", "samples"),
    [({"inputs": "a"}, True), ({"inputs": "a", "parameters": {}}, False)],
)
async def test_absent_parameters_sample_and_empty_ones_do_not(
    body: dict[str, Any], samples: bool
) -> None:
    async with serving() as edge:
        await edge.post("/generate", body)
        assert edge.batcher.requests[0].sampling.do_sample is samples


async def test_every_optional_parameter_may_be_null() -> None:
    names = [
        "best_of",
        "temperature",
        "repetition_penalty",
        "frequency_penalty",
        "top_k",
        "top_p",
        "typical_p",
        "max_new_tokens",
        "return_full_text",
        "truncate",
        "seed",
        "top_n_tokens",
        "grammar",
        "adapter_id",
        "min_p",
    ]
    async with serving() as edge:
        asked = {"inputs": "a", "parameters": dict.fromkeys(names), "unknown": {"x": [1]}}
        assert (await edge.post("/generate", asked))[0] == 200
        request = edge.batcher.requests[0]
        assert request.max_new_tokens == 15
        assert not request.sampling.samples


async def test_answer_headers() -> None:
    async with serving() as edge:
        _, _, response = await edge.post("/generate", ASKED)
        headers = response.headers
        assert headers["x-compute-type"] == "1-cpu"
        assert headers["x-compute-characters"] == "11"
        assert headers["x-prompt-tokens"] == "2"
        assert headers["x-generated-tokens"] == "2"
        assert float(headers["x-compute-time"]) > 0
        for name in ("total", "validation", "queue", "inference"):
            assert headers[f"x-{name}-time"].isdecimal()
        assert headers["x-time-per-token"].isdecimal()


async def test_stream_bytes_and_headers() -> None:
    def script(request: ValidRequest, stream: TokenStream) -> None:
        stream.batched_at = stream.queued_at
        stream.send(token_event(1, "é", logprob=-1.3242188, q=-0.25))
        end = finished("é", 2, reason=FinishReason.EOS_TOKEN, seed=2**64 - 1)
        stream.send(token_event(2, "</s>", logprob=float("nan"), finished=end))

    async with serving(script) as edge:
        asked = with_parameters(details=True, top_n_tokens=1)
        status, text, response = await edge.post("/generate_stream", asked)
    assert status == 200
    assert text == (
        'data: {"index":1,"token":{"id":1,"text":"é","logprob":-1.3242188,"special":false},'
        '"top_tokens":[{"id":9,"text":"q","logprob":-0.25,"special":false}],'
        '"generated_text":null,"details":null}\n\n'
        'data: {"index":2,"token":{"id":2,"text":"</s>","logprob":null,"special":true},'
        '"generated_text":"é","details":{"finish_reason":"eos_token","generated_tokens":2,'
        '"seed":18446744073709551615,"input_length":2,"cached_tokens":0}}\n\n'
    )
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-type"] == "1-cpu"
    assert response.headers["x-compute-characters"] == "11"
    assert "x-total-time" not in response.headers


def with_cached(num_cached: int, predicted: float | None = None) -> Any:
    """A script whose prompts are found computed so far, and were expected to wait so long."""

    def script(request: ValidRequest, stream: TokenStream) -> None:
        stream.cached_tokens, stream.predicted_queue_seconds = num_cached, predicted
        echo(request, stream)

    return script


async def test_cached_tokens_are_told() -> None:
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
        assert [request.terms for request in edge.batcher.requests] == [
            Terms(priority=-3, tenant="me", max_queue_seconds=1.5),
            Terms(priority=7, tenant="me", max_queue_seconds=1.5),
            Terms(),
        ]
    async with serving(max_queue_wait=2.0) as edge:
        await edge.post(path, ASKED, headers=headers)
        await edge.post(path, ASKED)
        assert [request.terms for request in edge.batcher.requests] == [
            Terms(priority=-3, max_queue_seconds=1.5),
            Terms(max_queue_seconds=2.0),
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


async def test_a_priority_of_another_type_is_no_priority() -> None:
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
        stream.send(token_event(1, "a"))
        async with await posting as response:
            line = await response.content.readuntil(b"\n\n")
            assert json.loads(line[6:])["token"]["text"] == "a"
            stream.send(token_event(2, "b", finished=finished("ab", 2)))
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


async def test_tokenize_counts_bytes_and_ignores_truncate() -> None:
    async with serving() as edge:
        asked = {"inputs": "wörld 日本 a", "parameters": {"truncate": 1}}
        status, body, _ = await edge.post("/tokenize", asked)
    assert status == 200
    assert [(t["text"], t["start"], t["stop"]) for t in body] == [
        ("wörld", 0, 6),
        ("日本", 7, 13),
        ("a", 14, 15),
    ]


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
async def test_much_text_is_tokenized_beside_the_event_loop(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()
    sizes: list[int] = []
    encode, dumps = Tokenizer.encode_with_offsets, orjson.dumps

    def watched_encode(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[TokenSpan]:
        threads.add(threading.get_ident())
        return encode(self, text, add_special_tokens=add_special_tokens)

    def watched_dumps(value: Any) -> bytes:
        if isinstance(value, list) and value:
            threads.add(threading.get_ident())
            sizes.append(len(value))
        return dumps(value)

    monkeypatch.setattr(Tokenizer, "encode_with_offsets", watched_encode)
    monkeypatch.setattr(orjson, "dumps", watched_dumps)
    words = "hello " * 250_000
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
    assert len(tokens) == sum(sizes) == 250_000
    assert tokens[-1] == {"id": 2, "text": "hello", "start": 1_499_994, "stop": 1_499_999}
    assert threading.get_ident() not in threads
    assert max(sizes) <= SPANS_AT_ONCE


async def test_truncate_keeps_the_last_tokens() -> None:
    async with serving(echo) as edge:
        await edge.post("/generate", {"inputs": "a b hello", "parameters": {"truncate": 2}})
        whole = edge.services.tokenizer.encode("a b hello")
        assert edge.batcher.requests[0].input_ids == whole[-2:]
