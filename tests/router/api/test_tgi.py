"""TGI's own routes, the estimate and the status over real sockets."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from tokenizers.processors import TemplateProcessing
from yarl import URL

from millrace_router.api.tgi.probes import RECENT
from millrace_router.errors import ShuttingDown
from millrace_router.images.prompts import NO_IMAGES
from millrace_router.prediction.forecast import Estimate, Prediction
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.text.tokenizer import SPANS_AT_ONCE, Tokenizer, TokenSpan
from millrace_testing.router.edge import (
    UNKNOWN,
    Edge,
    echo,
    finished,
    limits_with,
    logging_to,
    play,
    serving,
    token_event,
)
from millrace_testing.router.fake_router import DirectShards, new_batcher
from millrace_testing.shards.fake_shard import FakeShard

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
async def test_an_image_in_the_text_is_named_in_the_header_and_in_the_log(path: str) -> None:
    lines = io.BytesIO()
    with logging_to(lines):
        async with serving(echo) as edge:
            for inputs, ignored in (
                ("What is ![](https://example.com/a.png)?", "inputs.image"),
                ("![a cat](data:image/png;base64,AAAA)", "inputs.image"),
                ('![a cat]( data:image/png;base64,AA\nAA "a cat" )', "inputs.image"),
                ("![a file](here)", "inputs.image"),
                ("![](), ![ ](, and [a link](https://example.com)", None),
            ):
                body = {"inputs": inputs, "parameters": {"max_new_tokens": 2}}
                status, _, response = await edge.post(path, body)
                assert status == 200
                assert response.headers.get("x-millrace-ignored") == ignored
    assert lines.getvalue().count(b"inputs.image") == 1


def test_images_that_do_not_end_are_text() -> None:
    for text in (
        "![](data:" + " " * 200_000 + '"',
        "![](data:" * 50_000,
        "![" * 200_000,
        '![](a "' * 50_000,
    ):
        assert not NO_IMAGES.leaves_images(text)


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
        body = await edge.answer("/generate", asked)
        first, second = (request.sampling.seed for request in edge.batcher.requests)
        lines = await edge.exposition()
        assert edge.services.infer.permits.taken == 0
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


ESTIMATE_ROUTE = "/v1/estimate"
ESTIMATE = Estimate(
    prediction=Prediction(queue_seconds=0.5, first_token_seconds=1.25, finish_seconds=3.0004),
    num_cached=4,
    num_waiting=3,
    num_running=2,
)
TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
ESTIMATED = {"inputs": "hello world a", "parameters": {"max_new_tokens": 5}}


@asynccontextmanager
async def serving_estimate(estimate: Estimate = ESTIMATE, **options: Any) -> AsyncIterator[Edge]:
    """A server whose batcher estimates every request as `estimate`."""
    async with serving(None, template=TEMPLATE, **options) as edge:
        edge.batcher.estimated_as = estimate
        yield edge


@pytest.mark.parametrize(
    ("body", "num_prompt", "max_new"),
    [
        (ESTIMATED, 3, 5),
        ({"inputs": "a b"}, 2, 14),
        ({"inputs": "a b hello", "parameters": {"truncate": 1}}, 1, 15),
        ({"messages": [{"role": "user", "content": "a b"}], "max_tokens": 4}, 2, 4),
        ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 1}, 1, 1),
        ({"prompt": "a b hello", "max_tokens": 2}, 3, 2),
        ({"prompt": ["a b"], "stream": True}, 2, 14),
    ],
)
async def test_every_kind_of_body_is_estimated(
    body: dict[str, Any], num_prompt: int, max_new: int
) -> None:
    async with serving_estimate() as edge:
        status, answer, response = await edge.post(ESTIMATE_ROUTE, body)
        (estimated,) = edge.batcher.estimated
        assert edge.batcher.requests == []
        metrics = edge.services.metrics
    assert (status, response.content_type) == (200, "application/json")
    assert answer == {
        "prompt_tokens": num_prompt,
        "max_new_tokens": max_new,
        "fits": True,
        "reason": None,
        "cached_tokens": 4,
        "image_tiles": 0,
        "predicted": {"queue_ms": 500.0, "first_token_ms": 1250.0, "finish_ms": 3000.4},
        "waiting": 3,
        "running": 2,
    }
    assert (len(estimated.input_ids), estimated.max_new_tokens) == (num_prompt, max_new)
    assert metrics.request_count.value == 0
    assert sum(metrics.request_input_length.counts) == 0


async def test_while_nothing_is_known_nothing_is_predicted() -> None:
    async with serving_estimate(replace(UNKNOWN, num_waiting=1)) as edge:
        _, answer, _ = await edge.post(ESTIMATE_ROUTE, ESTIMATED)
    assert answer["predicted"] is None
    assert (answer["fits"], answer["waiting"], answer["running"]) == (True, 1, 0)


@pytest.mark.parametrize(
    ("body", "num_prompt", "max_new", "reason"),
    [
        ({"inputs": "a " * 9}, 9, 7, "`inputs` must have less than 8 tokens. Given: 9"),
        (
            {"inputs": "a", "parameters": {"max_new_tokens": 16}},
            1,
            16,
            "`inputs` tokens + `max_new_tokens` must be <= 16. "
            "Given: 1 `inputs` tokens and 16 `max_new_tokens`",
        ),
        (
            {"messages": [{"role": "user", "content": "a " * 20}]},
            20,
            0,
            "`messages` tokens + `max_tokens` must be <= 16. "
            "Given: 20 `messages` tokens and 0 `max_tokens`",
        ),
    ],
)
async def test_an_estimate_answers_with_the_reason_why_a_request_does_not_fit(
    body: dict[str, Any], num_prompt: int, max_new: int, reason: str
) -> None:
    async with serving_estimate() as edge:
        answer = await edge.answer(ESTIMATE_ROUTE, body)
        (estimated,) = edge.batcher.estimated
    assert answer == {
        "prompt_tokens": num_prompt,
        "max_new_tokens": max_new,
        "fits": False,
        "reason": f"Input validation error: {reason}",
        "cached_tokens": 0,
        "image_tiles": 0,
        "predicted": None,
        "waiting": 3,
        "running": 2,
    }
    # Its tokens, which may be many, go nowhere.
    assert len(estimated.input_ids) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": "a", "parameters": {"top_k": 0}}, "`top_k` must be strictly positive"),
        ({"inputs": "a", "parameters": {"adapter_source": "s3"}}, "`adapter_source` s3"),
        ({"inputs": "a", "parameters": {"best_of": 3, "top_k": 1}}, "`best_of` must be > 0"),
        ({"inputs": "a", "parameters": {"priority": 11}}, "`priority` must be an integer"),
        ({"inputs": 5}, "inputs: "),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "user", "content": "a"}], "n": 9}, "`n` must be > 0"),
        ({"prompt": ["a", "b"]}, "`prompt` must be one prompt to be estimated. Given: 2"),
        ({"prompt": "a", "logprobs": 9}, "`logprobs` must be >= 0 and <= 5"),
        ({}, "needs one of `inputs`, `messages` and `prompt`"),
        ([], "needs one of `inputs`, `messages` and `prompt`"),
        ({"inputs": "a", "prompt": "a"}, "and no more than one"),
    ],
)
async def test_other_mistakes_are_errors(body: object, message: str) -> None:
    async with serving_estimate() as edge:
        status, answer, _ = await edge.post(ESTIMATE_ROUTE, body)
        assert edge.batcher.estimated == []
        assert edge.services.metrics.request_failure.labels(err="validation").value == 0
    assert (status, answer["error_type"]) == (422, "validation")
    assert message in answer["error"]


async def test_without_a_template_there_is_no_chat() -> None:
    async with serving() as edge:
        body = {"messages": [{"role": "user", "content": "a"}]}
        status, answer, _ = await edge.post(ESTIMATE_ROUTE, body)
    assert (status, answer["error_type"]) == (422, "template_error")


async def test_scheduling_parameters_reach_the_estimate() -> None:
    async with serving_estimate(fairness="tenant", max_queue_wait=9.0) as edge:
        headers = {"x-priority": "3", "x-tenant": "me", "x-max-queue-ms": "2000"}
        await edge.post(ESTIMATE_ROUTE, ESTIMATED, headers=headers)
        await edge.post(ESTIMATE_ROUTE, {"inputs": "a " * 9}, headers=headers)
        await edge.post(ESTIMATE_ROUTE, {"prompt": "a", "priority": -2})
        status, answer, _ = await edge.post(ESTIMATE_ROUTE, ESTIMATED, headers={"x-priority": "x"})
        scheduling = [request.scheduling for request in edge.batcher.estimated]
    mine = SchedulingParameters(priority=3, tenant="me", max_queue_seconds=2.0)
    assert scheduling == [mine, mine, SchedulingParameters(priority=-2, max_queue_seconds=9.0)]
    assert (status, answer["error_type"]) == (422, "validation")


async def test_only_a_chat_has_no_special_tokens_added() -> None:
    async with serving_estimate() as edge:
        edge.services.tokenizer._rust.post_processor = TemplateProcessing(
            single="</s> $A", special_tokens=[("</s>", 1)]
        )
        for body in (
            {"inputs": "a"},
            {"prompt": "a"},
            {"messages": [{"role": "user", "content": "a"}]},
        ):
            await edge.post(ESTIMATE_ROUTE, body)
        lengths = [len(request.input_ids) for request in edge.batcher.estimated]
    assert lengths == [2, 2, 1]


async def test_a_full_server_still_estimates() -> None:
    async with serving_estimate(limits=limits_with(max_concurrent_requests=1)) as edge:
        running = asyncio.create_task(edge.post("/generate", ESTIMATED))
        await edge.batcher.arrived.wait()
        assert (await edge.post("/generate", ESTIMATED))[0] == 429
        answers = await asyncio.gather(*(edge.post(ESTIMATE_ROUTE, ESTIMATED) for _ in range(5)))
        assert [status for status, *_ in answers] == [200] * 5
        play(edge.batcher.streams[0], "x")
        await running


async def test_a_draining_server_refuses_estimates() -> None:
    async with serving_estimate() as edge:
        edge.services.infer.drain()
        status, answer, _ = await edge.post(ESTIMATE_ROUTE, ESTIMATED)
        assert (status, answer["error_type"]) == (503, "unavailable")
        with pytest.raises(ShuttingDown):
            await edge.services.infer.estimate(GenerationRequest(prompt="a"))


def test_the_batcher_estimates_from_observed_costs() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard)
    request = ValidRequest(input_ids=tuple(range(2, 10)), max_new_tokens=4)
    assert batcher.estimate(request) == UNKNOWN
    for decodes in range(1, 17):
        batcher._predictor.cost.observe(StepLoad(decodes=decodes, context=8 * decodes), 1.0)
    batcher.submit(request)
    known = batcher.estimate(request)
    assert (known.num_waiting, known.num_running) == (1, 0)
    assert known.prediction is not None
    assert known.prediction.finish_seconds > known.prediction.first_token_seconds > 0


async def test_only_prompts_that_fit_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real batcher: names of blocks are made on the event loop, so not of any prompt there is."""
    hashed: list[int] = []
    first = BlockHashes.first

    def watched(keys: BlockHashes, count: int, prompt: Any, generated: Any) -> Any:
        hashed.append(len(prompt))
        return first(keys, count, prompt, generated)

    monkeypatch.setattr(BlockHashes, "first", watched)
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard)
    async with serving() as edge:
        edge.services.infer._batcher = batcher
        _, answer, _ = await edge.post(ESTIMATE_ROUTE, {"inputs": "a " * 100_000})
        assert (answer["fits"], answer["prompt_tokens"]) == (False, 100_000)
        _, answer, _ = await edge.post(ESTIMATE_ROUTE, {"inputs": "a " * 8})
        assert answer["fits"]
    assert max(hashed) == 8


STATUS_BODY = {"inputs": "a", "parameters": {"max_new_tokens": 4}}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def test_metrics_are_at_one_path_that_proxies_can_close() -> None:
    async with serving() as edge:
        for path, status in (("/metrics", 200), ("/metrics?a=%6d", 200), ("/%6detrics", 404)):
            async with edge.client.get(URL(edge.url + path, encoded=True)) as answer:
                assert answer.status == status


async def test_the_figures_are_those_of_the_metrics() -> None:
    async with serving(lambda _, stream: play(stream, "a", "b", "a", "b")) as edge:
        metrics = edge.services.metrics
        now = 0.0
        edge.runner.app[RECENT]._clock = lambda: now
        edge.runner.app[RECENT]._started_at = now
        edge.runner.app[RECENT]._readings.append(edge.runner.app[RECENT]._read())
        metrics.kv_blocks.set(40)
        metrics.kv_blocks_in_use.set(10)
        metrics.kv_blocks_cached.set(4)
        metrics.requests_running.set(3)
        metrics.requests_waiting.set(2)
        metrics.recoveries.labels(reason="lost").inc()
        metrics.recoveries.labels(reason="hung").inc(2)
        metrics.prefill_tokens.inc(1)
        metrics.prefix_cache_hit_tokens.inc(3)
        for _ in range(5):
            assert (await edge.post("/generate", STATUS_BODY))[0] == 200
        now = 10.0
        status, body, answer = await edge.get("/status")
    found = orjson.loads(body)
    assert (status, answer.content_type) == (200, "application/json")
    assert 0 < found.pop("first_token_median_seconds") <= found.pop("first_token_p95_seconds")
    assert found.pop("version")
    assert found == {
        "model_id": "org/tiny",
        "ready": True,
        "reason": None,
        "uptime_seconds": 10.0,
        "requests_running": 3,
        "requests_waiting": 2,
        "max_concurrent_requests": 4,
        "kv_use": 0.25,
        "kv_cached": 0.1,
        "recoveries": 3,
        "window_seconds": 10.0,
        "tokens_per_second": 2.0,
        "cached_share": 0.75,
    }


async def test_nothing_is_read_without_a_request() -> None:
    async with serving(lambda _, stream: play(stream, "a", "b")) as edge:
        for _ in range(3):
            await edge.post("/generate", STATUS_BODY)
        assert len(edge.runner.app[RECENT]._readings) == 1


async def test_the_status_names_the_reason_why_the_server_is_not_ready() -> None:
    async with serving(api_key="secret") as edge:
        edge.batcher.status.begin_outage("shard-0: killed")
        found = orjson.loads((await edge.get("/status"))[1])
        assert (found["ready"], found["reason"]) == (
            False,
            "the shards are recovering: shard-0: killed",
        )
        edge.services.infer.drain()
        found = orjson.loads((await edge.get("/status"))[1])
        assert not found["ready"]
        assert "shutting down" in found["reason"].lower()


async def test_a_browser_gets_the_page_and_programs_the_figures() -> None:
    async with serving() as edge:
        _, body, answer = await edge.get("/status", headers=BROWSER)
        assert (answer.content_type, answer.headers["cache-control"]) == ("text/html", "no-cache")
        assert b"<dl" in body
        _, _, answer = await edge.get("/status", headers={"accept": "*/*"})
        assert answer.content_type == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert "accept" in answer.headers["vary"]


async def test_special_tokens_and_the_template_are_reported() -> None:
    async with serving(template="{{ messages }}", limits=limits_with(max_total_tokens=24)) as edge:
        edge.services.template.special_tokens["eos_token"] = "</s>"
        async with edge.client.get(edge.url + "/tokenizer_info") as response:
            answer = await response.json()
    assert answer == {
        "bos_token": None,
        "eos_token": "</s>",
        "unk_token": None,
        "pad_token": None,
        "chat_template": "{{ messages }}",
        "model_max_length": 24,
    }


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hello wörld", "add_special_tokens": False}, [2, 4]),
        ({"prompt": "hello", "model": "m", "add_special_tokens": None}, [2]),
        ({"prompt": ""}, []),
    ],
    ids=["text", "null", "empty"],
)
async def test_prompts_are_tokenized_in_the_shape_of_vllm(
    body: dict[str, Any], tokens: list[int]
) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post("/tokenize", body)
    assert (status, answer) == (
        200,
        {"count": len(tokens), "max_model_len": 16, "tokens": tokens},
    )


async def test_inputs_are_still_tokenized_in_the_shape_of_tgi() -> None:
    async with serving() as edge:
        for body in ({"inputs": "a b"}, {"inputs": "a b", "prompt": "x"}):
            _, answer, _ = await edge.post("/tokenize", body)
            assert [token["id"] for token in answer] == [6, 7]


@pytest.mark.parametrize("ids", [[2, 4], [], [2, 10**6, 1]], ids=["some", "none", "unknown"])
async def test_token_ids_become_text(ids: list[int]) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post("/detokenize", {"tokens": ids})
        expected = edge.services.tokenizer.decode(ids, skip_special_tokens=False)
    assert (status, answer) == (200, {"prompt": expected})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
    ],
)
async def test_bodies_of_another_shape_are_refused(path: str, body: dict[str, Any]) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post(path, body)
    assert (status, answer["error_type"]) == (422, "validation")
