"""Several choices of one request: seeds, order, usage, and the computation of the shared prompt."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_router.errors import QueueFull
from millrace_router.request.request import ValidRequest, seed_of_sample
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import (
    Edge,
    finished,
    limits_with,
    play,
    plays,
    serving,
    token_event,
)
from millrace_testing.router.fake_router import DirectShards, collect, new_batcher, running
from millrace_testing.shards.fake_shard import FakeShard

URLS = ("/v1/chat/completions", "/v1/completions")
CHAT = {"messages": [{"role": "user", "content": "a"}]}
ASKED: dict[str, dict[str, Any]] = {URLS[0]: CHAT, URLS[1]: {"prompt": "a"}}
TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"


served = partial(serving, template=TEMPLATE)


def counting(*, logprob: Callable[[int], float] = lambda _: -0.5) -> Any:
    """A script: the first generation says ` 0`, the second ` 1 1`, and so on, all with the same log probability."""
    number = iter(range(100))

    def script(_: ValidRequest, stream: TokenStream) -> None:
        this = next(number)
        play(stream, *[f" {this}"] * (this + 1), logprob=logprob(this))

    return script


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def events_of(edge: Edge, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    return [chunk for chunk in await edge.chunks(path, body) if not _is_opening(chunk)]


def _is_opening(chunk: dict[str, Any]) -> bool:
    return any("role" in choice.get("delta", {}) for choice in chunk["choices"])


@pytest.mark.parametrize("path", URLS)
async def test_each_choice_is_a_separate_generation(path: str) -> None:
    async with served(counting()) as edge:
        status, answer, response = await edge.post(path, {**ASKED[path], "n": 3})
        assert edge.services.infer.permits.taken == 0
        requests = edge.batcher.requests
        lines = await edge.exposition()
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [text_of(choice) for choice in answer["choices"]] == [" 0", " 1 1", " 2 2 2"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert len({request.sampling.seed for request in requests}) == 3
    # The prompt has one token.
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 6,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert response.headers["x-prompt-tokens"] == "1"
    assert response.headers["x-generated-tokens"] == "6"
    assert "tgi_request_count 3" in lines
    assert "tgi_request_success 3" in lines
    assert "tgi_request_input_length_count 1" in lines


@pytest.mark.parametrize("path", URLS)
async def test_choices_of_a_stream_take_turns_and_have_their_index(path: str) -> None:
    async with served(None) as edge, asyncio.TaskGroup() as group:
        body = {**ASKED[path], "n": 2, "stream_options": {"include_usage": True}}
        reading = group.create_task(events_of(edge, path, body))
        async with asyncio.timeout(30):
            while len(edge.batcher.streams) < 2:
                await asyncio.sleep(0)
        first, second = edge.batcher.streams
        first.token(token_event(1, "x"))
        second.token(token_event(1, "y"))
        second.token(token_event(2, "y", finished=finished("yy", 2)))
        first.token(token_event(2, "x", finished=finished("xx", 2)))
        *chunks, usage = await reading
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
    assert [choice["index"] for choice in choices] == [0, 1, 1, 0]
    assert texts == ["x", "y", "y", "x"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert (bool(reasons[0]), bool(reasons[1]), reasons[2:]) == (False, False, ["length"] * 2)
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (1, 4)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_the_first_choice_has_the_prompt_s_tokens() -> None:
    """With TGI's usage per choice, the numbers of the choices add up."""
    async with served(counting()) as edge:
        chunks = await events_of(edge, "/v1/completions", {"prompt": ["a b", "a"], "n": 2})
    last = [chunk for chunk in chunks if "usage" in chunk]
    told = {
        chunk["choices"][0]["index"]: (
            chunk["usage"]["prompt_tokens"],
            chunk["usage"]["completion_tokens"],
        )
        for chunk in last
    }
    assert told == {0: (2, 1), 1: (0, 2), 2: (1, 3), 3: (0, 4)}


async def test_choices_of_several_prompts_stand_together() -> None:
    async with served(counting()) as edge:
        body = {"prompt": ["a b", "hello"], "n": 2}
        _, answer, _ = await edge.post("/v1/completions", body)
        prompts = [request.input_ids for request in edge.batcher.requests]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert [choice["text"] for choice in answer["choices"]] == [
        " 0",
        " 1 1",
        " 2 2 2",
        " 3 3 3 3",
    ]
    assert answer["usage"]["prompt_tokens"] == 3


def independent_seed(seed: int, index: int) -> int:
    """The documented seed: the first 8 bytes of SHA-256 over both numbers, each big-endian in 8 bytes."""
    text = f"{seed:016x}{index:016x}"
    return int(sha256(bytes.fromhex(text)).hexdigest()[:16], 16)


@pytest.mark.parametrize("path", URLS)
async def test_seeds_of_choices_follow_from_the_seed_of_the_request(path: str) -> None:
    async with served(counting()) as edge:
        await edge.post(path, {**ASKED[path], "n": 3, "seed": 7})
        await edge.post(path, {**ASKED[path], "seed": 7})
        seeds = [request.sampling.seed for request in edge.batcher.requests]
    assert seeds == [7, independent_seed(7, 1), independent_seed(7, 2), 7]


@given(st.integers(0, 2**64 - 1), st.integers(1, 200))
def test_a_sample_s_seed_is_as_documented(seed: int, index: int) -> None:
    assert seed_of_sample(seed, 0) == seed
    assert seed_of_sample(seed, index) == independent_seed(seed, index) < 2**64


async def test_without_a_seed_all_are_drawn() -> None:
    async with served(counting()) as edge:
        for _ in range(2):
            await edge.post(URLS[0], {**CHAT, "n": 2})
        seeds = {request.sampling.seed for request in edge.batcher.requests}
    assert len(seeds) == 4


@pytest.mark.parametrize("path", URLS)
@pytest.mark.parametrize("n", [0, -1, 4])
async def test_n_outside_its_bounds_is_refused(path: str, n: int) -> None:
    async with served(counting()) as edge:
        status, answer, _ = await edge.post(path, {**ASKED[path], "n": n})
        assert edge.batcher.requests == []
    assert status == 422
    message = f"Input validation error: `n` must be > 0 and <= 3. Given: {n}"
    assert answer["error"]["message"] == message


@pytest.mark.parametrize("path", URLS)
async def test_choices_get_a_permit_each_or_none(path: str) -> None:
    limits = limits_with(max_concurrent_requests=2)
    async with served(None, limits=limits) as edge:
        status, answer, _ = await edge.post(path, {**ASKED[path], "n": 3})
        assert (status, answer["error_type"]) == (429, "overloaded")
        assert edge.batcher.requests == []
        assert edge.services.infer.permits.taken == 0


@pytest.mark.parametrize("path", URLS)
async def test_a_choice_that_cannot_be_queued_takes_the_others_with_it(path: str) -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        if len(edge.batcher.streams) == 2:
            raise QueueFull(2, retry_after_seconds=1.0)

    async with served(script) as edge:
        status, answer, _ = await edge.post(path, {**ASKED[path], "n": 3})
        lines = await edge.exposition()
        assert edge.services.infer.permits.taken == 0
    assert (status, answer["error_type"]) == (429, "overloaded")
    assert edge.batcher.streams[0].closed
    assert "tgi_request_count 1" in lines
    assert 'tgi_request_failure{err="overloaded"} 1' in lines


@pytest.mark.parametrize("path", URLS)
async def test_a_client_that_leaves_closes_all_choices(path: str) -> None:
    async with served(None) as edge:
        body = {**ASKED[path], "n": 3, "stream": True}
        posting = asyncio.create_task(edge.client.post(edge.url + path, json=body))
        await edge.batcher.arrived.wait()
        edge.batcher.streams[0].token(token_event(1, "x"))
        response = await posting
        response.close()
        await edge.services.infer.permits.all_free()
        assert [stream.closed for stream in edge.batcher.streams] == [True] * 3


async def test_the_likeliest_samples_are_the_choices() -> None:
    # Mean log probabilities, not sums: the last is the longest.
    script = counting(logprob=lambda number: (-1.0, -3.0, -0.5)[number])
    async with served(script, limits=limits_with(max_best_of=3)) as edge:
        body = {"prompt": "a", "n": 2, "best_of": 3, "seed": 1}
        answer = await edge.answer("/v1/completions", body)
        seeds = [request.sampling.seed for request in edge.batcher.requests]
    assert [choice["text"] for choice in answer["choices"]] == [" 2 2 2", " 0"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (1, 6)
    assert seeds == [1, independent_seed(1, 1), independent_seed(1, 2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 0}, "`best_of` must be >= `n`. Given: 0 and 1"),
        ({"best_of": 1, "n": 2}, "`best_of` must be >= `n`. Given: 1 and 2"),
        ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
        (
            {"best_of": 2, "stream": True},
            "`best_of` > `n` is not supported when streaming tokens",
        ),
        ({"best_of": 2, "temperature": 0}, "you must use sampling when `best_of` is > 1"),
    ],
)
async def test_best_of_outside_its_bounds_is_refused(fields: dict[str, Any], message: str) -> None:
    async with served(counting()) as edge:
        status, answer, _ = await edge.post("/v1/completions", {"prompt": "a", **fields})
    assert (status, answer["error_type"]) == (422, "validation")
    assert answer["error"]["message"] == f"Input validation error: {message}"


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 3, "n": 3}, {"best_of": None}])
async def test_best_of_that_leaves_no_choice_out_changes_nothing(fields: dict[str, Any]) -> None:
    script = counting(logprob=lambda number: number - 9.0)
    async with served(script) as edge:
        chunks = await events_of(edge, "/v1/completions", {"prompt": "a", **fields})
        edge.batcher.script = counting(logprob=lambda number: number - 9.0)
        _, answer, _ = await edge.post("/v1/completions", {"prompt": "a", **fields})
    num_choices = fields.get("n", 1)
    assert [choice["text"][:2] for choice in answer["choices"]] == [
        f" {number}" for number in range(num_choices)
    ]
    assert {chunk["choices"][0]["index"] for chunk in chunks} == set(range(num_choices))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "told"), [(None, 0), (0, 0), (1, 1), (2, 2), (3, 3)])
async def test_candidates_that_tie_for_the_last_rank_are_cut(
    asked: int | None, told: int, *, stream: bool
) -> None:
    """The shards tell of all that tie, as TGI does; OpenAI's clients count on `top_logprobs` of them."""

    def script(_: ValidRequest, stream: TokenStream) -> None:
        end = finished("x", 1)
        stream.token(token_event(1, "x", finished=end, a=-0.5, b=-1.0, c=-1.0, d=-1.0))

    async with served(script) as edge:
        body = {**CHAT, "logprobs": True, "top_logprobs": asked}
        if stream:
            (chunk,) = await events_of(edge, URLS[0], body)
            content = chunk["choices"][0]["logprobs"]["content"]
        else:
            _, answer, _ = await edge.post(URLS[0], body)
            content = answer["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in content[0]["top_logprobs"]] == ["a", "b", "c", "d"][:told]


@pytest.mark.parametrize("num_samples", [2, 3])
async def test_the_prompt_s_full_blocks_are_computed_once(num_samples: int) -> None:
    """Through the scheduler: siblings wait for the first, and compute what is left of the prompt themselves."""
    shard = FakeShard(block_size=4)
    chunks: list[int] = []
    step = shard.step

    def watched(request: Any) -> Any:
        chunks.extend(request.prefill.chunk_tokens)
        return step(request)

    shard.step = watched  # type: ignore[method-assign]
    prompt = tuple(range(1, 15))
    async with running(new_batcher(DirectShards(shard), shard)) as batcher:
        streams = [
            batcher.submit(ValidRequest(input_ids=prompt, max_new_tokens=2))
            for _ in range(num_samples)
        ]
        for stream in streams:
            assert len(await collect(stream)) == 2
    # Three full blocks, and the last two tokens, which have no full block.
    assert sum(chunks) == 14 + (num_samples - 1) * 2


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("path", URLS)
@pytest.mark.parametrize("stream", [False, True])
async def test_answered_choices_are_freed_without_the_collector(path: str, *, stream: bool) -> None:
    async with served(counting()) as edge:
        _ = await edge.answer(path, {**ASKED[path], "n": 2, "stream": stream})
        streams = [weakref.ref(stream) for stream in edge.batcher.streams]
        edge.batcher.streams.clear()
        await edge.get("/health")
        assert [stream() for stream in streams] == [None, None]


@pytest.mark.parametrize("path", URLS)
async def test_a_special_token_in_the_middle_of_a_stream_is_hidden(path: str) -> None:
    async with served(plays("a", " b", "</s>", " c", " d")) as edge:
        chunks = await events_of(edge, path, ASKED[path])
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = [
        choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices
    ]
    assert said == ["a", " b", "", " c", " d"]
