"""Requests with the same `Idempotency-Key`, over real sockets, share one generation."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import limits_with, play
from millrace_testing.router.idempotent import (
    ASKED,
    CHAT,
    GRACE,
    KEY,
    NUM_TOKENS,
    advance,
    all_ended,
    begin,
    index_of,
    keyed_edge,
    num_runs,
    prompts_of,
    read_events,
    readers,
    streaming,
    until,
)

STREAMS = [
    ("/generate_stream", ASKED),
    ("/", ASKED | {"stream": True}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    (
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True},
    ),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True}),
    (
        "/v1/completions",
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
    ),
]
WHOLE = [
    ("/generate", ASKED),
    ("/", ASKED),
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": ["a", "b"]}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_dropped_stream_resumes_at_every_token(path: str, body: dict[str, object]) -> None:
    """Its two parts are what another reader got undisturbed, to the byte; for every place, before and after the end."""
    prompts = prompts_of(body)
    # A choice of a chat begins with an event without a token.
    events_before = prompts if "chat" in path else 0
    for num_rounds in range(NUM_TOKENS + 1):
        for num_read in range(num_rounds * prompts + (events_before if num_rounds else 0) + 1):
            async with keyed_edge() as (edge, _), asyncio.TaskGroup() as group:
                undisturbed = group.create_task(edge.post(path, body, headers=KEY))
                await until(lambda: len(edge.batcher.streams) == prompts)
                for index in range(1, num_rounds + 1):
                    advance(edge, index)
                head = b""
                if num_read:
                    async with streaming(edge, path, body) as response:
                        head = await read_events(response, num_read)
                        for index in range(num_rounds + 1, NUM_TOKENS + 1):
                            advance(edge, index)
                else:
                    for index in range(num_rounds + 1, NUM_TOKENS + 1):
                        advance(edge, index)
                known = {"last-event-id": str(num_read)} if num_read else {}
                status, tail, _ = await edge.post(path, body, headers=KEY | known)
                whole = (await undisturbed)[1]
                assert status == 200
                assert head.decode() + tail == whole
                ids = [int(number) for number in re.findall(r"^id: (\d+)$", whole, re.MULTILINE)]
                assert ids == list(range(1, NUM_TOKENS * prompts + events_before + 1))
                assert len(edge.batcher.streams) == prompts


async def test_a_resumed_stream_goes_on_live() -> None:
    async with keyed_edge(begin) as (edge, timers):
        async with streaming(edge, "/generate_stream", ASKED) as response:
            await read_events(response, 1)
        await until(lambda: readers(edge) == 0)
        advance(edge, 2)
        timers.turn(GRACE - 1)
        known = {"last-event-id": "1"}
        async with streaming(edge, "/generate_stream", ASKED, **known) as response:
            assert index_of(await read_events(response, 1)) == 2
            timers.turn(GRACE)
            for index in (3, 4):
                advance(edge, index)
                assert index_of(await read_events(response, 1)) == index
            assert await response.content.read() == b""


async def test_without_a_key_streams_are_as_ever() -> None:
    """The bytes are the same except for the ids, and unknown ids are ignored."""

    def script(_: ValidRequest, stream: TokenStream) -> None:
        play(stream, " a", " b")

    async with keyed_edge(script) as (edge, _):
        _, keyed, _ = await edge.post("/generate_stream", ASKED, headers=KEY)
        _, plain, _ = await edge.post("/generate_stream", ASKED, headers={"last-event-id": "7"})
    assert "id: " not in plain
    assert re.sub(r"id: \d+\n", "", keyed) == plain
    assert len(edge.batcher.streams) == 2


@pytest.mark.parametrize(("path", "body"), WHOLE)
async def test_whole_answers_are_one(path: str, body: dict[str, object]) -> None:
    prompts = prompts_of(body)
    async with (
        keyed_edge(limits=limits_with(max_concurrent_requests=prompts)) as (edge, timers),
        asyncio.TaskGroup() as group,
    ):
        both = [group.create_task(edge.post(path, body, headers=KEY)) for _ in range(2)]
        await until(lambda: readers(edge) == 2 and len(edge.batcher.streams) == prompts)
        for stream in edge.batcher.streams:
            play(stream, " a", " b")
        (status, first, response), (_, second, again) = [await one for one in both]
        timers.turn(GRACE - 1)
        _, third, late = await edge.post(path, body, headers=KEY)
        assert status == 200
        assert first == second == third
        own = {"x-request-id", "date"}
        for other in (again, late):
            assert {k: v for k, v in other.headers.items() if k.lower() not in own} == {
                k: v for k, v in response.headers.items() if k.lower() not in own
            }
        assert response.headers["x-request-id"] != again.headers["x-request-id"]
        assert len(edge.batcher.streams) == prompts
        timers.turn(1)
        assert num_runs(edge) == 0


@pytest.mark.parametrize(("path", "body"), WHOLE)
@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_dropped_call_is_answered_when_it_is_sent_again(
    path: str, body: dict[str, object], *, has_ended: bool
) -> None:
    prompts = prompts_of(body)
    async with keyed_edge() as (edge, timers):
        dropped = asyncio.create_task(edge.post(path, body, headers=KEY))
        await until(lambda: readers(edge) == 1 and len(edge.batcher.streams) == prompts)
        dropped.cancel()
        await until(lambda: readers(edge) == 0)
        timers.turn(GRACE - 1)
        assert not any(stream.closed for stream in edge.batcher.streams)
        if has_ended:
            for stream in edge.batcher.streams:
                play(stream, " a", " b")
            await until(lambda: all_ended(edge))
            # Its end has begun the period anew.
            timers.turn(GRACE - 1)
        again = asyncio.create_task(edge.post(path, body, headers=KEY))
        if not has_ended:
            await until(lambda: readers(edge) == 1)
            timers.turn(GRACE)
            for stream in edge.batcher.streams:
                play(stream, " a", " b")
        status, answer, _ = await again
        assert status == 200
        assert " a b" in json.dumps(answer)
        assert len(edge.batcher.streams) == prompts


async def test_two_read_a_stream_at_once() -> None:
    async with (
        keyed_edge(begin, grace=0.0) as (edge, _),
        streaming(edge, "/generate_stream", ASKED) as first,
    ):
        early = await read_events(first, 1)
        async with streaming(edge, "/generate_stream", ASKED) as second:
            assert await read_events(second, 1) == early
            for index in range(2, NUM_TOKENS + 1):
                advance(edge, index)
                assert await read_events(second, 1) == await read_events(first, 1)
        assert await first.content.read() == b""
        assert len(edge.batcher.streams) == 1


async def test_callers_share_nothing() -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        play(stream, " a")

    async with keyed_edge(script) as (edge, _):
        for caller in ({}, {"authorization": "Bearer a"}, {"x-tenant": "a"}, {"x-tenant": "b"}):
            for _ in range(2):
                assert (await edge.post("/generate", ASKED, headers=KEY | caller))[0] == 200
        assert len(edge.batcher.streams) == 4


async def test_what_cannot_be_meant_is_refused() -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        play(stream, " a", " b")

    async with keyed_edge(script) as (edge, _):
        other = ASKED | {"inputs": "b"}
        assert (await edge.post("/generate_stream", ASKED, headers=KEY))[0] == 200
        assert (await edge.post("/generate", ASKED, headers=KEY))[0] == 200
        for body, path, headers, message in (
            (other, "/generate_stream", KEY, "has been used for a request with another body"),
            (ASKED, "/generate_stream", {"idempotency-key": ""}, "1 to 255 characters. Given: 0"),
            (ASKED, "/generate", {"idempotency-key": "k" * 256}, "characters. Given: 256"),
            (ASKED, "/generate_stream", KEY | {"last-event-id": "3"}, "id of an event"),
            (ASKED, "/generate_stream", KEY | {"last-event-id": "x"}, "id of an event"),
            (ASKED, "/generate", KEY | {"last-event-id": "1"}, "id of an event"),
        ):
            status, answer, _ = await edge.post(path, body, headers=headers)
            assert (status, answer["error_type"]) == (422, "validation")
            assert message in answer["error"]
        assert len(edge.batcher.streams) == 2
        assert 'tgi_request_failure{err="validation"} 6' in await edge.exposition()
        longest = {"idempotency-key": "k" * 255}
        assert (await edge.post("/generate", ASKED, headers=longest))[0] == 200


async def test_a_body_that_is_too_long_is_refused_before_it_is_compared() -> None:
    async with keyed_edge(payload_limit=1000) as (edge, _):
        long = ASKED | {"inputs": "a" * 1000}
        status, answer, _ = await edge.post("/generate", long, headers=KEY)
    assert (status, answer["error_type"]) == (413, "validation")


async def test_silence_is_broken_for_every_reader() -> None:
    async with keyed_edge(keep_alive_seconds=0.01) as (edge, _):
        async with (
            streaming(edge, "/generate_stream", ASKED) as first,
            streaming(edge, "/generate_stream", ASKED) as second,
        ):
            assert await read_events(first, 2) == await read_events(second, 2) == b":\n\n" * 2
        await until(lambda: readers(edge) == 0)
