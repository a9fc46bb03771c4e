"""The flag: what takes it down, what puts it up, and checks that are cut off."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from millrace_fakes_edge import FakeBatcher, FakeShards, echo, fail, play, serving, token_event
from millrace_router.entry import TokenStream
from millrace_router.errors import (
    GenerationError,
    NonFiniteOutput,
    QueueExpired,
    QueueFull,
    Unhealthy,
)
from millrace_router.health import Health
from millrace_router.request import ValidRequest

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}


class CancelledShards(FakeShards):
    """Shards whose channel is reset under every call."""

    async def health(self, *, timeout: float) -> None:
        raise asyncio.CancelledError


async def test_output_that_is_not_finite_is_that_requests_own_affair() -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.fail(NonFiniteOutput())

    async with serving(script) as edge:
        status, body, _ = await edge.post("/generate", ASKED)
        assert (status, body["error_type"]) == (424, "generation")
        assert body["error"].endswith("Server error: the model's output is not finite")
        assert (await edge.get("/health"))[0] == 200
        assert len(edge.batcher.requests) == 1
        assert 'tgi_request_failure{err="generation"} 1' in await edge.exposition()


@pytest.mark.parametrize("parameters", [{}, {"best_of": 2, "do_sample": True}])
async def test_a_generation_restores_health(parameters: dict[str, object]) -> None:
    async with serving(fail) as edge:
        await edge.post("/generate", ASKED)
        edge.batcher.script = echo
        assert (await edge.post("/generate", {"inputs": "a", "parameters": parameters}))[0] == 200
        edge.batcher.script = fail
        assert (await edge.get("/health"))[0] == 200


async def test_a_token_of_another_request_stands_in_for_the_probe() -> None:
    async with serving(fail) as edge:
        await edge.post("/generate", ASKED)
        edge.batcher.script = None
        edge.batcher.arrived.clear()
        other = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        edge.batcher.arrived.clear()
        check = asyncio.create_task(edge.get("/health"))
        await edge.batcher.arrived.wait()
        running, probe = edge.batcher.streams[1:]
        running.send(token_event(1, "x"))
        # The probe gets no token: it still waits in the queue.
        async with asyncio.timeout(5):
            assert (await check)[0] == 200
        assert probe.closed
        running.send(token_event(2, "y"))
        play(running, "z")
        await other


async def test_without_tokens_it_stays_unhealthy() -> None:
    batcher = FakeBatcher()
    health = Health(FakeShards(), batcher, timeout_seconds=0.02)
    health.failed(GenerationError("no"))
    with pytest.raises(Unhealthy):
        await health.check()
    assert batcher.streams[0].closed
    health.generated()
    await health.check()


class FullBatcher(FakeBatcher):
    """Nobody may queue, or nobody may wait for long."""

    expires = False

    def submit(self, request: ValidRequest) -> TokenStream:
        if self.expires:
            stream = super().submit(request)
            stream.fail(QueueExpired(retry_after_seconds=1.0))
            return stream
        self.arrived.set()
        raise QueueFull(1, retry_after_seconds=1.0)


@pytest.mark.parametrize("expires", [False, True])
async def test_with_a_full_queue_it_is_up_to_the_tokens_of_others(*, expires: bool) -> None:
    batcher = FullBatcher()
    batcher.expires = expires
    health = Health(FakeShards(), batcher, timeout_seconds=60.0)
    health.failed(GenerationError("no"))
    asking = asyncio.create_task(health.check())
    await batcher.arrived.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asking.done()
    health.generated()
    await asking


async def test_with_a_full_queue_that_stands_still_it_is_unhealthy() -> None:
    health = Health(FakeShards(), FullBatcher(), timeout_seconds=0.02)
    health.failed(GenerationError("no"))
    with pytest.raises(Unhealthy):
        await health.check()


async def test_a_check_whose_channel_is_reset_is_answered() -> None:
    async with serving() as edge:
        edge.services.health._shards = CancelledShards()
        for _ in range(2):
            status, body, _ = await edge.get("/health")
            assert status == 503
            assert orjson.loads(body) == {"error": "unhealthy", "error_type": "healthcheck"}
        edge.services.health._shards = edge.shards
        assert (await edge.get("/health"))[0] == 200


async def test_a_check_that_is_really_cancelled_ends() -> None:
    batcher = FakeBatcher()
    health = Health(FakeShards(), batcher)
    health.failed(GenerationError("no"))
    asking = asyncio.create_task(health.check())
    await batcher.arrived.wait()
    assert health._check is not None
    health._check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert batcher.streams[0].closed
