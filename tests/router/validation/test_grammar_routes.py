"""Grammars over HTTP: what reaches the shards, what is refused with which status, and what else waits meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from millrace_router.request.limits import Limits
from millrace_router.request.request import FinishReason, Grammar, GrammarKind, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.server.services import Services
from millrace_router.start.shards import RouterDeployment
from millrace_testing.router.edge import (
    FakeBatcher,
    finished,
    limits_with,
    play,
    services_over,
    serving,
    token_event,
)

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
OF_SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false}',
    closes=True,
)
REGEX = {"type": "regex", "value": "a+"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
OPENAI: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "a"},
}
NATIVE = ("/", "/generate", "/generate_stream")
WITH_REGEX: dict[str, dict[str, Any]] = {
    **{path: {"inputs": "a", "parameters": {"grammar": REGEX}} for path in NATIVE},
    **{path: {**body, "response_format": REGEX} for path, body in OPENAI.items()},
}


def served(**options: Any) -> Any:
    return serving(**{"template": "a", **options})


def nested(num_levels: int) -> Any:
    value: Any = {}
    for _ in range(num_levels - 1):
        value = {"items": value}
    return value


def message_of(answer: Any) -> str:
    error = answer["error"]
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", WITH_REGEX)
async def test_a_grammar_reaches_the_shards(path: str) -> None:
    async with served() as edge:
        _ = await edge.answer(path, WITH_REGEX[path])
        (request,) = edge.batcher.requests
    assert request.grammar == Grammar(GrammarKind.REGEX, "a+")
    assert edge.batcher.compiler.asked == [request.grammar]


@pytest.mark.parametrize("path", OPENAI)
async def test_openai_s_schema_reaches_the_shards(path: str) -> None:
    schema = {"name": "n", "strict": True, "schema": SCHEMA}
    body = {**OPENAI[path], "response_format": {"type": "json_schema", "json_schema": schema}}
    async with served() as edge:
        status, _, _ = await edge.post(path, body)
        (request,) = edge.batcher.requests
    assert (status, request.grammar) == (200, OF_SCHEMA)


@pytest.mark.parametrize("path", WITH_REGEX)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_is_refused_is_422_with_the_reason(path: str, *, stream: bool) -> None:
    async with served() as edge:
        edge.batcher.compiler.refusal = lambda grammar: f"{grammar.source} is odd"
        status, answer, _ = await edge.post(path, {**WITH_REGEX[path], "stream": stream})
        assert edge.services.infer.permits.taken == 0
        assert edge.batcher.requests == []
        lines = await edge.exposition()
    assert (status, answer["error_type"]) == (422, "validation")
    assert message_of(answer) == "Input validation error: grammar is not valid: a+ is odd"
    assert 'tgi_request_failure{err="validation"} 1' in lines


@pytest.mark.parametrize("path", WITH_REGEX)
async def test_requests_with_grammars_are_refused_where_these_are_off(path: str) -> None:
    async with served(limits=limits_with(grammars=False)) as edge:
        status, answer, _ = await edge.post(path, WITH_REGEX[path])
        info = json.loads((await edge.get("/info"))[1])
        without = {"parameters": {"max_new_tokens": 1}} if "inputs" in WITH_REGEX[path] else {}
        allowed = {**WITH_REGEX[path], "response_format": {"type": "text"}, **without}
        assert (await edge.post(path, allowed))[0] == 200
    assert (status, message_of(answer)) == (422, "Input validation error: grammar is not supported")
    assert info["grammars"] is False


@pytest.mark.parametrize(
    ("of_shards", "flag", "are_on"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_shards_or_a_flag_turn_grammars_off(*, of_shards: bool, flag: bool, are_on: bool) -> None:
    limits = limits_with(grammars=of_shards)
    services = services_over(FakeBatcher(), limits=limits, disable_grammar_support=flag)
    resolved = limits_from(services)
    assert resolved.grammars is are_on
    services.tokenizer.close()


def limits_from(services: Services) -> Limits:
    deployment = RouterDeployment(
        config=services.config, info=services.shard, capacity=services.capacity
    )
    return deployment.limits()


def test_more_choices_than_permits_are_never_allowed() -> None:
    services = services_over(FakeBatcher(), max_concurrent_requests=5, max_n=9)
    assert limits_from(services).max_n == 5
    services.tokenizer.close()


async def test_invalid_bodies_of_grammars_are_located() -> None:
    async with served() as edge:
        body = {"inputs": "a", "parameters": {"grammar": {"type": "yaml", "value": "a"}}}
        status, answer, _ = await edge.post("/generate", body)
        assert (status, answer["error_type"]) == (422, "validation")
        assert "parameters.grammar" in answer["error"]
        bad = {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": 5}}}
        status, answer, _ = await edge.post("/v1/chat/completions", bad)
        assert (status, answer["error_type"]) == (422, "validation")
        assert "response_format.json_schema.name" in answer["error"]["message"]


async def test_a_grammar_is_compiled_once_a_request_for_any_number_of_choices() -> None:
    async with served() as edge:
        body = {**WITH_REGEX["/v1/chat/completions"], "n": 3}
        for _ in range(2):
            assert (await edge.post("/v1/chat/completions", body))[0] == 200
        assert len(edge.batcher.requests) == 6
        assert len(edge.batcher.compiler.asked) == 2


async def test_other_requests_do_not_wait_for_a_grammar() -> None:
    gate = asyncio.Event()
    async with served(limits=limits_with(max_concurrent_requests=9)) as edge:
        edge.batcher.compiler.gate = gate
        slow_ones = [
            asyncio.create_task(
                edge.post(
                    "/generate",
                    {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": f"{i}"}}},
                )
            )
            for i in range(6)
        ]
        async with asyncio.timeout(10):
            while edge.services.infer.permits.taken < 6:
                await asyncio.sleep(0)
        assert (await edge.post("/generate", {"inputs": "a"}))[0] == 200
        assert (await edge.get("/health"))[0] == 200
        assert not any(task.done() for task in slow_ones)
        gate.set()
        assert {(await task)[0] for task in slow_ones} == {200}


async def test_a_client_that_leaves_while_its_grammar_is_compiled_gives_its_permit_back() -> None:
    async with served() as edge:
        edge.batcher.compiler.gate = asyncio.Event()
        task = asyncio.create_task(edge.post("/generate", WITH_REGEX["/generate"]))
        async with asyncio.timeout(10):
            while not edge.services.infer.permits.taken:
                await asyncio.sleep(0)
        task.cancel()
        await edge.services.infer.permits.all_free()


@pytest.mark.parametrize("has_given_up", [False, True])
async def test_a_restart_of_the_shards_is_waited_for(*, has_given_up: bool) -> None:
    async with served() as edge:
        shards = edge.batcher.status
        shards.begin_outage("killed")
        task = asyncio.create_task(edge.post("/generate", WITH_REGEX["/generate"]))
        async with asyncio.timeout(10):
            while not edge.services.infer.permits.taken:
                await asyncio.sleep(0)
        if has_given_up:
            shards.give_up("five crashes")
        else:
            shards.end_outage()
        status, answer, _ = await task
    if has_given_up:
        assert (status, answer["error_type"]) == (503, "unavailable")
        assert answer["error"] == "The model server is down: five crashes"
    else:
        assert (status, answer) == (200, {"generated_text": " x x x"})


async def test_requests_that_may_not_wait_for_a_restart_are_refused() -> None:
    async with served() as edge:
        edge.batcher.status.begin_outage("killed")
        headers = {"x-max-queue-ms": "20"}
        status, answer, response = await edge.post(
            "/generate", WITH_REGEX["/generate"], headers=headers
        )
        assert (status, answer["error_type"]) == (429, "overloaded")
        assert response.headers["retry-after"] == "1"


async def test_an_estimate_asks_for_no_grammar() -> None:
    async with served() as edge:
        status, answer, _ = await edge.post("/v1/estimate", WITH_REGEX["/generate"])
        assert (status, answer["fits"]) == (200, True)
        (estimated,) = edge.batcher.estimated
        assert estimated.grammar == Grammar(GrammarKind.REGEX, "a+")
        assert edge.batcher.compiler.asked == []
        bad = {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": 1}}}
        status, answer, _ = await edge.post("/v1/estimate", bad)
        assert (status, answer["error"]) == (
            422,
            "Input validation error: grammar is not supported",
        )


def ends(reason: FinishReason) -> Callable[[ValidRequest, TokenStream], None]:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.batched_at = stream.queued_at
        stream.token(token_event(1, "aa"))
        stream.token(token_event(2, "</s>", finished=finished("aa", 2, reason=reason)))

    return script


@pytest.mark.parametrize(
    ("reason", "native", "openai"),
    [
        (FinishReason.EOS_TOKEN, "eos_token", "stop"),
        (FinishReason.LENGTH, "length", "length"),
    ],
)
async def test_guided_generations_report_their_finish_reason(
    reason: FinishReason, native: str, openai: str
) -> None:
    details = {"inputs": "a", "parameters": {"grammar": REGEX, "details": True}}
    async with served(script=ends(reason)) as edge:
        _, answer, _ = await edge.post("/generate", details)
        assert answer["details"]["finish_reason"] == native
        _, answer, _ = await edge.post("/v1/chat/completions", WITH_REGEX["/v1/chat/completions"])
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == (openai, "aa")


@pytest.mark.parametrize("path", OPENAI)
async def test_further_sampling_parameters_are_accepted(path: str) -> None:
    body = {
        **OPENAI[path],
        "temperature": 0.5,
        "min_p": 0.25,
        "top_k": 3,
        "typical_p": 0.5,
        "logit_bias": {"5": -100, "2": 1.5},
    }
    neutral = {"min_p": 0, "top_k": -1, "typical_p": 1, "logit_bias": {}}
    greedy = {**body, "temperature": 0, "logit_bias": None}
    async with served() as edge:
        for asked in (body, {**OPENAI[path], **neutral}, greedy):
            await edge.answer(path, asked)
        first, second, third = (request.sampling for request in edge.batcher.requests)
    assert (first.min_p, first.top_k, first.typical_p) == (0.25, 3, 0.5)
    assert first.bias == ((5, -100.0), (2, 1.5))
    assert (second.min_p, second.top_k, second.typical_p, second.bias) == (0.0, 0, 1.0, ())
    assert not third.samples


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"8": 1}}, "`logit_bias` contains token id 8, but the model knows only 8"),
        ({"logit_bias": {"x": 1}}, "`logit_bias` must have token ids for keys. Given: x"),
        (
            {"logit_bias": {"1": 101}},
            "`logit_bias` must have numbers from -100 to 100 for values. Token 1 has another",
        ),
        (
            {"logit_bias": {str(id_): 1 for id_ in range(301)}},
            "`logit_bias` must have at most 300 tokens. Given: 301",
        ),
        ({"min_p": 1.5}, "`min_p` must be >= 0.0 and <= 1.0"),
        ({"top_k": -2}, "`top_k` must be strictly positive"),
        ({"typical_p": 1.5}, "`typical_p` must be > 0.0 and < 1.0"),
        (
            {"response_format": REGEX, "ignore_eos": True},
            "`ignore_eos` has no meaning with a grammar, which decides where a text ends",
        ),
    ],
)
async def test_invalid_sampling_parameters_are_refused(
    path: str, fields: dict[str, Any], message: str
) -> None:
    async with served() as edge:
        status, answer, _ = await edge.post(path, {**OPENAI[path], **fields})
        assert edge.services.infer.permits.taken == 0
        assert "tgi_request_count 1" in await edge.exposition()
    assert (status, answer["error_type"]) == (422, "validation")
    assert answer["error"]["message"] == f"Input validation error: {message}"


@pytest.mark.parametrize("path", NATIVE)
async def test_watermark_and_min_p_reach_the_shards(path: str) -> None:
    async with served() as edge:
        for parameters in ({"watermark": True, "min_p": 0.5}, {}):
            body = {"inputs": "a", "parameters": parameters}
            assert (await edge.post(path, body))[0] == 200
        first, second = (request.sampling for request in edge.batcher.requests)
    assert (first.watermark, first.min_p, first.samples) == (True, 0.5, True)
    assert (second.watermark, second.min_p, second.samples) == (False, 0.0, False)


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"3": 1}},
        {"n": 2},
        {"min_p": 0.5},
    ],
)
async def test_a_key_is_refused_for_a_body_with_any_difference(more: dict[str, Any]) -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        play(stream, "x")

    path, headers = "/v1/chat/completions", {"idempotency-key": "k"}
    async with served(script=script, resume_grace=9.0) as edge:
        assert (await edge.post(path, CHAT, headers=headers))[0] == 200
        status, answer, _ = await edge.post(path, {**CHAT, **more}, headers=headers)
        assert status == 422
        assert "has been used for a request with another body" in answer["error"]["message"]
        assert len(edge.batcher.requests) == 1


@pytest.mark.parametrize("strict_tgi", [False, True])
@pytest.mark.parametrize("pad", ["", "x" * 2**14], ids=["small", "large"])
async def test_grammars_of_any_size_are_read(pad: str, *, strict_tgi: bool) -> None:
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

    async with served(strict_tgi=strict_tgi) as edge:
        for path, body in asked(SCHEMA).items():
            answer = await edge.answer(path, body)
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


async def test_a_grammar_is_bounded_over_http() -> None:
    def asked(num_bytes: int) -> dict[str, Any]:
        return {"inputs": "a", "parameters": {"grammar": {**REGEX, "value": "a" * num_bytes}}}

    async with served() as edge:
        _ = await edge.answer("/generate", asked(2**17))
        status, answer, _ = await edge.post("/generate", asked(2**17 + 1))
    assert (status, message_of(answer)) == (
        422,
        "Input validation error: grammar is not valid: it must have at most 131072 bytes. Given: 131073",
    )


async def test_a_schema_takes_a_permit_before_it_is_read() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    body = {**CHAT, "tools": [tool], "tool_choice": "required"}
    async with served(limits=limits_with(max_concurrent_requests=1)) as edge:
        assert (await edge.post("/v1/chat/completions", body))[0] == 422
        async with edge.services.infer.permit():
            assert (await edge.post("/v1/chat/completions", body))[0] == 429
            lines = await edge.exposition()
    assert 'tgi_request_failure{err="overloaded"} 1' in lines


async def test_prompts_do_not_wait_for_schemas_that_are_read() -> None:
    gate = threading.Event()
    async with served() as edge:
        slow = [
            asyncio.create_task(edge.services.validator.make_grammar(gate.wait)) for _ in range(8)
        ]
        try:
            async with asyncio.timeout(30):
                assert (await edge.post("/generate", {"inputs": "a"}))[0] == 200
            assert not any(task.done() for task in slow)
        finally:
            gate.set()
        await asyncio.gather(*slow)
