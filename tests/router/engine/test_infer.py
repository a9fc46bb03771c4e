"""Permits, endings and clients that leave, over real sockets where sockets matter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from millrace_router.engine.infer import Infer, Permits
from millrace_router.errors import (
    GenerationError,
    IncompleteGeneration,
    Overloaded,
    QueueExpired,
    ShuttingDown,
    ValidationError,
)
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.request import SchedulingParameters
from millrace_router.request.token_stream import TokenEvent, read_tokens
from millrace_router.telemetry.metrics import Metrics
from millrace_router.validation.validator import Validator
from millrace_testing.router.edge import (
    Edge,
    FakeBatcher,
    echo,
    fail,
    finished,
    grammars_of,
    limits_with,
    play,
    services_over,
    serving,
    token_event,
)
from millrace_testing.router.fake_router import DirectShards, new_batcher, running, tiny_tokenizer
from millrace_testing.shards.hash_shard import HashShard

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt="a", **fields)


def new_infer(batcher: FakeBatcher, total: int = 2) -> Infer:
    limits = limits_with(max_concurrent_requests=total)
    return services_over(batcher, limits=limits).infer


def failures(infer: Infer) -> dict[str, float]:
    metrics = infer._metrics
    labels = ("overloaded", "validation", "generation", "dropped", "incomplete")
    counts = {label: metrics.request_failure.labels(err=label).value for label in labels}
    return {label: value for label, value in counts.items() if value}


def test_permits_are_all_or_nothing() -> None:
    permits = Permits(3, lambda: 0.0)
    permits.take(2)
    with pytest.raises(Overloaded):
        permits.take(2)
    assert permits.free == 1
    permits.give(2)
    assert permits.taken == 0


async def test_a_permit_is_held_until_the_generation_closes() -> None:
    batcher = FakeBatcher()
    infer = new_infer(batcher, total=1)
    async with await infer.start(request()) as generation:
        with pytest.raises(Overloaded, match="Model is overloaded"):
            await infer.start(request())
        play(batcher.streams[0], "x")
        assert len((await generation.collect()).tokens) == 1
        assert infer.permits.taken == 1
    assert infer.permits.taken == 0
    assert failures(infer) == {"overloaded": 1}
    generation.close()
    assert infer.permits.taken == 0


async def test_invalid_requests_give_their_permit_back() -> None:
    infer = new_infer(FakeBatcher(echo))
    with pytest.raises(ValidationError):
        await infer.start(request(top_k=0))
    with pytest.raises(ValidationError):
        await infer.generate(request(best_of=2))
    with pytest.raises(ValidationError):
        await infer.generate(request(best_of=3, do_sample=True))
    with pytest.raises(ValidationError):
        await infer.start(request(best_of=2, do_sample=True))
    assert infer.permits.taken == 0
    assert failures(infer) == {"validation": 4}


async def test_an_ended_request_is_logged_as_running_no_more() -> None:
    generation = await new_infer(FakeBatcher()).start(request())
    timer = generation._progress._timer
    assert not timer.cancelled()
    generation.close()
    assert timer.cancelled()


async def test_failures_are_raised_and_counted_once() -> None:
    infer = new_infer(FakeBatcher(fail))
    with pytest.raises(GenerationError) as caught:
        await infer.generate(request())
    assert str(caught.value) == "Request failed during generation: Server error: out of luck"
    with pytest.raises(GenerationError):
        await infer.generate(request(best_of=2, do_sample=True))
    assert infer.permits.taken == 0
    assert failures(infer) == {"generation": 2}


async def test_one_failing_sample_closes_the_others() -> None:
    batcher = FakeBatcher()
    infer = new_infer(batcher)
    task = asyncio.create_task(infer.generate(request(best_of=2, do_sample=True)))
    await batcher.arrived.wait()
    batcher.streams[0].fail(GenerationError("no"))
    with pytest.raises(GenerationError):
        await task
    assert batcher.streams[1].closed
    assert infer.permits.taken == 0
    assert failures(infer) == {"generation": 1}


async def test_the_samples_of_best_of_compute_one_prompt() -> None:
    shard = HashShard()
    batcher = new_batcher(DirectShards(shard), shard, max_batch_prefill_tokens=64)
    metrics = Metrics(max_input_tokens=32, max_total_tokens=64)
    limits = limits_with(max_input_tokens=32, max_total_tokens=64, vocab_size=97)
    validator = Validator(tiny_tokenizer(), limits, metrics, grammars_of())
    infer = Infer(batcher, validator, metrics)
    generation_request = request(best_of=2, do_sample=True, max_new_tokens=3)
    async with running(batcher):
        best = await infer.generate(replace(generation_request, prompt=" w5" * 11))
    cached = [best.cached_tokens, *(other.cached_tokens for other in best.others)]
    assert sorted(cached) == [0, 8], "all but the last, partial block is found computed"


async def test_the_time_until_a_request_is_queued_is_reported_once() -> None:
    batcher, reported = FakeBatcher(), list[float]()
    infer = new_infer(batcher)
    infer._on_entry = reported.append
    async with await infer.start(request()) as generation:
        assert reported == [generation.times.validation]
    with pytest.raises(ValidationError):
        await infer.start(request(temperature=-1.0))
    assert len(reported) == 1


async def test_a_stream_without_an_end_is_our_fault() -> None:
    batcher = FakeBatcher()
    infer = new_infer(batcher)
    async with await infer.start(request()) as generation:
        batcher.streams[0].token(token_event(1, "a"))
        batcher.streams[0].finished_at = 1.0
        with pytest.raises(IncompleteGeneration, match=r"^Incomplete generation$"):
            await generation.collect()
    assert failures(infer) == {"incomplete": 1}


async def test_cancelled_requests_close_their_streams() -> None:
    for parameters in ({}, {"best_of": 2, "do_sample": True}):
        batcher = FakeBatcher()
        infer = new_infer(batcher)
        task = asyncio.create_task(infer.generate(request(**parameters)))
        await batcher.arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(stream.closed for stream in batcher.streams)
        assert infer.permits.taken == 0
        assert failures(infer) == {"dropped": 1}


async def test_a_draining_server_accepts_nothing() -> None:
    batcher = FakeBatcher()
    infer = new_infer(batcher)
    async with await infer.start(request()):
        infer.drain()
        with pytest.raises(ShuttingDown):
            await infer.start(request())
        with pytest.raises(ShuttingDown):
            await infer.generate(request())
        waiting = asyncio.create_task(infer.permits.all_free())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


class Received:
    """A sink that keeps what it receives, and is defective from some token on."""

    def __init__(self, *, defect_at: int | None = None) -> None:
        self.tokens: list[TokenEvent] = []
        self.errors: list[Exception] = []
        self._defect_at = defect_at

    def token(self, event: TokenEvent) -> None:
        if event.index == self._defect_at:
            raise ValueError("odd")
        self.tokens.append(event)

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.mark.parametrize("num_before", [0, 1, 2])
async def test_a_sink_receives_earlier_and_later_events(num_before: int) -> None:
    infer, received = new_infer(batcher := FakeBatcher()), Received()
    async with await infer.start(request()) as generation:
        (stream,) = batcher.streams
        last = token_event(2, "y", finished=finished("xy", 2))
        events = [token_event(1, "x"), last]
        for event in events[:num_before]:
            stream.token(event)
        generation.connect(received)
        for count, event in enumerate(events[num_before:], start=num_before):
            assert received.tokens == events[:count]
            stream.token(event)
    assert received.tokens == events
    assert received.errors == []
    assert generation.generated_tokens == 2
    assert failures(infer) == {}


@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
async def test_a_sink_receives_a_failure_last_and_once(num_before: int) -> None:
    infer, received = new_infer(batcher := FakeBatcher()), Received()
    async with await infer.start(request()) as generation:
        (stream,) = batcher.streams
        news: list[Callable[[], None]] = [
            lambda: stream.token(token_event(1, "x")),
            lambda: stream.fail(GenerationError("no")),
            lambda: stream.fail(GenerationError("twice")),
        ]
        for tell in news[:num_before]:
            tell()
        generation.connect(received)
        for tell in news[num_before:]:
            tell()
    assert [event.index for event in received.tokens] == [1]
    assert [str(error) for error in received.errors] == [str(GenerationError("no"))]
    assert failures(infer) == {"generation": 1}


async def test_a_defect_of_a_sink_stays_its_own() -> None:
    infer, received = new_infer(batcher := FakeBatcher()), Received(defect_at=1)
    async with await infer.start(request()) as generation:
        generation.connect(received)
        batcher.streams[0].token(token_event(1, "x"))
    assert [type(error) for error in received.errors] == [ValueError]


async def test_a_sink_of_a_closed_generation_receives_nothing() -> None:
    infer, received = new_infer(batcher := FakeBatcher()), Received()
    async with await infer.start(request()) as generation:
        generation.connect(received)
    batcher.streams[0].token(token_event(1, "x"))
    batcher.streams[0].fail(GenerationError("no"))
    assert (received.tokens, received.errors) == ([], [])
    assert failures(infer) == {"dropped": 1}


async def test_a_disconnected_sink_receives_nothing_while_tokens_still_count() -> None:
    infer, received = new_infer(batcher := FakeBatcher()), Received()
    async with await infer.start(request()) as generation:
        generation.connect(received)
        batcher.streams[0].token(token_event(1, "x"))
        generation.disconnect()
        batcher.streams[0].token(token_event(2, "y"))
        batcher.streams[0].fail(GenerationError("no"))
        assert (generation.generated_tokens, generation.error_type) == (2, "generation")
    assert [event.index for event in received.tokens] == [1]
    assert received.errors == []
    assert failures(infer) == {"generation": 1}


async def test_reading_may_end_before_the_generation() -> None:
    infer = new_infer(batcher := FakeBatcher())
    async with await infer.start(request()) as generation:
        play(batcher.streams[0], "x", "y", "z")
        read: list[int] = []

        def take(event: TokenEvent) -> bool:
            read.append(event.index)
            return event.index == 2

        await read_tokens(generation, take)
    assert read == [1, 2]
    assert generation.generated_tokens == 3


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_a_client_that_leaves_before_the_first_token_frees_its_permit(path: str) -> None:
    async with serving(None) as edge:
        await leave_after(edge, path, tokens=0)
        assert edge.services.infer.permits.taken == 0
        lines = await edge.exposition()
        assert 'tgi_request_failure{err="dropped"} 1' in lines


async def test_a_client_that_leaves_a_stream_frees_its_permit() -> None:
    async with serving(None) as edge:
        await leave_after(edge, "/generate_stream", tokens=1)
        assert edge.services.infer.permits.taken == 0


async def leave_after(edge: Edge, path: str, *, tokens: int) -> None:
    """Start a stream, read `tokens` events, disconnect, and wait until the batcher has dropped the request."""
    reader, writer = await edge.open(path, ASKED)
    for index in range(tokens):
        edge.batcher.streams[0].token(token_event(index + 1, "x"))
        await reader.readuntil(b"\n\n")
    writer.transport.abort()
    await edge.batcher.closed.wait()
    assert edge.batcher.streams[0].closed
    await edge.services.infer.permits.all_free()


async def test_overload_predicts_when_to_retry() -> None:
    async with serving(None, limits=limits_with(max_concurrent_requests=1)) as edge:
        first = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        for path in ("/", "/generate", "/generate_stream"):
            status, body, response = await edge.post(path, ASKED)
            assert status == 429
            assert body == {"error": "Model is overloaded", "error_type": "overloaded"}
            assert int(response.headers["retry-after"]) >= 1
        play(edge.batcher.streams[0], "x")
        assert (await first)[0] == 200


@pytest.mark.parametrize(("drains_in", "shown"), [(0.0, 1), (6.1, 7), (30.0, 30)])
async def test_retry_after_is_when_the_batcher_will_have_room(drains_in: float, shown: int) -> None:
    async with serving(None, limits=limits_with(max_concurrent_requests=1)) as edge:
        edge.batcher.drains_in = drains_in
        first = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        for path in ("/generate", "/generate_stream", "/tokenize"):
            status, _, response = await edge.post(path, ASKED)
            assert (status, response.headers["retry-after"]) == (429, str(shown))
        play(edge.batcher.streams[0], "x")
        await first


async def test_scheduling_parameters_reach_the_batcher() -> None:
    batcher = FakeBatcher(echo)
    scheduling = SchedulingParameters(priority=3, tenant="t", max_queue_seconds=2.0)
    infer = new_infer(batcher)
    await infer.generate(request(scheduling=scheduling))
    await infer.generate(request(best_of=2, do_sample=True, scheduling=scheduling))
    async with await infer.start(request(scheduling=scheduling)):
        pass
    await infer.generate(request())
    assert [asked.scheduling for asked in batcher.requests] == [scheduling] * 4 + [
        SchedulingParameters()
    ]


async def test_only_a_waiting_request_with_a_deadline_may_expire() -> None:
    infer = new_infer(batcher := FakeBatcher())
    scheduling = SchedulingParameters(max_queue_seconds=2.0)
    async with await infer.start(request(scheduling=scheduling)) as generation:
        waiting = generation.may_expire
        batcher.streams[0].batched_at = 1.0
        assert (waiting, generation.may_expire) == (True, False)
    async with await infer.start(request(scheduling=scheduling)) as generation:
        batcher.streams[1].fail(QueueExpired(retry_after_seconds=1.0))
        assert not generation.may_expire
    async with await infer.start(request()) as generation:
        assert not generation.may_expire


async def test_silence_is_filled_with_comments() -> None:
    async with serving(None, keep_alive_seconds=0.02) as edge, asyncio.TaskGroup() as group:
        posting = group.create_task(edge.client.post(f"{edge.url}/generate_stream", json=ASKED))
        async with await posting as response:
            assert response.status == 200
            assert await response.content.readuntil(b"\n\n") == b":\n\n"
            assert await response.content.readuntil(b"\n\n") == b":\n\n"
            (stream,) = edge.batcher.streams
            stream.token(token_event(1, "x"))
            events = (await response.content.readuntil(b"\n\n") for _ in count())
            assert json.loads(await next_data(events))["index"] == 1
            stream.token(token_event(2, "x", finished=finished("xx", 2)))
            assert json.loads(await next_data(events))["generated_text"] == "xx"


async def test_an_error_after_a_comment_is_an_event() -> None:
    async with serving(None, keep_alive_seconds=0.02) as edge, asyncio.TaskGroup() as group:
        posting = group.create_task(edge.client.post(f"{edge.url}/generate_stream", json=ASKED))
        async with await posting as response:
            assert await response.content.readuntil(b"\n\n") == b":\n\n"
            edge.batcher.streams[0].fail(GenerationError("late"))
            text = await response.content.read()
    assert text.replace(b":\n\n", b"") == (
        b'data: {"error":"Request failed during generation: Server error: late",'
        b'"error_type":"generation"}\n\n'
    )


async def next_data(events: object) -> bytes:
    """The next event that is not a comment."""
    async for event in events:  # type: ignore[attr-defined]
        if event != b":\n\n":
            assert event.startswith(b"data: ")
            return bytes(event[6:])
    raise AssertionError
