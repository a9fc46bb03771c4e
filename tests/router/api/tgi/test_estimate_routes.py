"""`/v1/estimate`: what it reads, what it reports, and that it takes no permit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from millrace_router.errors import ShuttingDown
from millrace_router.prediction.forecast import Estimate, Prediction
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_testing.router.edge import UNKNOWN, Edge, limits_with, play, serving
from millrace_testing.router.fake_router import DirectShards, new_batcher
from millrace_testing.shards.fake_shard import FakeShard

URL = "/v1/estimate"
ESTIMATE = Estimate(
    prediction=Prediction(queue_seconds=0.5, first_token_seconds=1.25, finish_seconds=3.0004),
    num_cached=4,
    num_waiting=3,
    num_running=2,
)
TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
ASKED = {"inputs": "hello world a", "parameters": {"max_new_tokens": 5}}


@asynccontextmanager
async def served(estimate: Estimate = ESTIMATE, **options: Any) -> AsyncIterator[Edge]:
    """A server whose batcher estimates every request as `estimate`."""
    async with serving(None, template=TEMPLATE, **options) as edge:
        edge.batcher.estimated_as = estimate
        yield edge


@pytest.mark.parametrize(
    ("body", "num_prompt", "max_new"),
    [
        (ASKED, 3, 5),
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
    async with served() as edge:
        status, answer, response = await edge.post(URL, body)
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
        "predicted": {"queue_ms": 500.0, "first_token_ms": 1250.0, "finish_ms": 3000.4},
        "waiting": 3,
        "running": 2,
    }
    assert (len(estimated.input_ids), estimated.max_new_tokens) == (num_prompt, max_new)
    assert metrics.request_count.value == 0
    assert sum(metrics.request_input_length.counts) == 0


async def test_while_nothing_is_known_nothing_is_predicted() -> None:
    async with served(replace(UNKNOWN, num_waiting=1)) as edge:
        _, answer, _ = await edge.post(URL, ASKED)
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
async def test_what_does_not_fit_is_an_answer(
    body: dict[str, Any], num_prompt: int, max_new: int, reason: str
) -> None:
    async with served() as edge:
        status, answer, _ = await edge.post(URL, body)
        (estimated,) = edge.batcher.estimated
    assert status == 200
    assert answer == {
        "prompt_tokens": num_prompt,
        "max_new_tokens": max_new,
        "fits": False,
        "reason": f"Input validation error: {reason}",
        "cached_tokens": 0,
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
    async with served() as edge:
        status, answer, _ = await edge.post(URL, body)
        assert edge.batcher.estimated == []
        assert edge.services.metrics.request_failure.labels(err="validation").value == 0
    assert (status, answer["error_type"]) == (422, "validation")
    assert message in answer["error"]


async def test_without_a_template_there_is_no_chat() -> None:
    async with serving() as edge:
        body = {"messages": [{"role": "user", "content": "a"}]}
        status, answer, _ = await edge.post(URL, body)
    assert (status, answer["error_type"]) == (422, "template_error")


async def test_scheduling_parameters_reach_the_estimate() -> None:
    async with served(fairness="tenant", max_queue_wait=9.0) as edge:
        headers = {"x-priority": "3", "x-tenant": "me", "x-max-queue-ms": "2000"}
        await edge.post(URL, ASKED, headers=headers)
        await edge.post(URL, {"inputs": "a " * 9}, headers=headers)
        await edge.post(URL, {"prompt": "a", "priority": -2})
        status, answer, _ = await edge.post(URL, ASKED, headers={"x-priority": "x"})
        scheduling = [request.scheduling for request in edge.batcher.estimated]
    mine = SchedulingParameters(priority=3, tenant="me", max_queue_seconds=2.0)
    assert scheduling == [mine, mine, SchedulingParameters(priority=-2, max_queue_seconds=9.0)]
    assert (status, answer["error_type"]) == (422, "validation")


async def test_only_a_chat_has_no_special_tokens_added() -> None:
    async with served() as edge:
        edge.services.tokenizer._rust.post_processor = TemplateProcessing(
            single="</s> $A", special_tokens=[("</s>", 1)]
        )
        for body in (
            {"inputs": "a"},
            {"prompt": "a"},
            {"messages": [{"role": "user", "content": "a"}]},
        ):
            await edge.post(URL, body)
        lengths = [len(request.input_ids) for request in edge.batcher.estimated]
    assert lengths == [2, 2, 1]


async def test_a_full_server_still_estimates() -> None:
    async with served(limits=limits_with(max_concurrent_requests=1)) as edge:
        running = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        assert (await edge.post("/generate", ASKED))[0] == 429
        answers = await asyncio.gather(*(edge.post(URL, ASKED) for _ in range(5)))
        assert [status for status, *_ in answers] == [200] * 5
        play(edge.batcher.streams[0], "x")
        await running


async def test_a_draining_server_does_not() -> None:
    async with served() as edge:
        edge.services.infer.drain()
        status, answer, _ = await edge.post(URL, ASKED)
        assert (status, answer["error_type"]) == (503, "unavailable")
        with pytest.raises(ShuttingDown):
            await edge.services.infer.estimate(GenerationRequest(prompt="a"))


def test_the_batcher_estimates_from_what_it_knows() -> None:
    shard = FakeShard()
    batcher = new_batcher(DirectShards(shard), shard)
    request = ValidRequest(input_ids=tuple(range(2, 10)), max_new_tokens=4)
    assert batcher.estimate(request) == UNKNOWN
    for decodes in range(1, 17):
        batcher._predictor.observe(StepLoad(decodes=decodes, context=8 * decodes), 1.0)
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
        _, answer, _ = await edge.post(URL, {"inputs": "a " * 100_000})
        assert (answer["fits"], answer["prompt_tokens"]) == (False, 100_000)
        _, answer, _ = await edge.post(URL, {"inputs": "a " * 8})
        assert answer["fits"]
    assert max(hashed) == 8
