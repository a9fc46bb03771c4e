"""The health routes in every state, and the events that clear and set the flag."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest

from millrace_router.engine.health import Health
from millrace_router.errors import (
    DoesNotFit,
    GenerationError,
    NonFiniteOutput,
    Quarantined,
    QueueExpired,
    QueueFull,
    RouterError,
    ShardsGone,
    Unhealthy,
)
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import (
    GRACE_SECONDS,
    Edge,
    FakeBatcher,
    echo,
    fail,
    play,
    serving,
    token_event,
)

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
STATES = ("serves", "recovers", "recovers for too long", "has given up", "drains")
HEALTH = ("/", "/health", "/ping")
AT_FAULT = "a shard was killed"
ILL = {"error": "unhealthy", "error_type": "healthcheck"}


def bring_into(state: str, edge: Edge) -> None:
    now, status = time.monotonic(), edge.batcher.status
    if state == "recovers":
        status.begin_outage(AT_FAULT)
        status.since = now - GRACE_SECONDS / 2
    elif state == "recovers for too long":
        status.begin_outage(AT_FAULT)
        status.since = now - GRACE_SECONDS - 1
    elif state == "has given up":
        status.give_up(AT_FAULT)
    elif state == "drains":
        edge.services.infer.drain()


def expected(state: str, path: str) -> int:
    """The status by the failure contract."""
    if path == "/livez":
        return 200
    well = {"serves"} if path == "/readyz" else {"serves", "recovers"}
    return 200 if state in well else 503


@pytest.mark.parametrize("state", STATES)
async def test_every_health_route_follows_the_state(state: str) -> None:
    async with serving(None, api_key="secret") as edge:
        bring_into(state, edge)
        for path in (*HEALTH, "/livez", "/readyz"):
            status, body, _ = await edge.get(path)
            assert (path, status) == (path, expected(state, path))
            async with edge.client.head(edge.url + path) as response:
                assert response.status == status
                assert await response.read() == b""
            if status == 200:
                assert body == b""
            elif state == "drains":
                assert orjson.loads(body) == {
                    "error": "Server is shutting down",
                    "error_type": "unavailable",
                }
            else:
                answer = orjson.loads(body)
                assert AT_FAULT in answer.pop("reason")
                assert answer == ILL


async def test_unhealthy_answers_name_the_outage_and_its_duration() -> None:
    now = 1000.0
    status = ShardStatus(60.0, lambda: now)
    health = Health(status, FakeBatcher())
    status.begin_outage(AT_FAULT)
    with pytest.raises(Unhealthy) as raised:
        await health.check_ready()
    assert raised.value.reason == "the shards are recovering: a shard was killed"
    now += 60.0
    await health.check()
    now += 1.0
    with pytest.raises(Unhealthy) as raised:
        await health.check()
    assert raised.value.reason == "the shards have not served for 61 s: a shard was killed"
    status.give_up("it fails at every start")
    with pytest.raises(Unhealthy) as raised:
        await health.check()
    assert raised.value.reason == "the shards do not come back: it fails at every start"


async def test_a_server_that_serves_is_not_troubled_by_checks() -> None:
    async with serving() as edge:
        for path in (*HEALTH, "/readyz"):
            assert (await edge.get(path))[0] == 200
        assert edge.batcher.requests == []


@pytest.mark.parametrize("error", [NonFiniteOutput, Quarantined, DoesNotFit])
async def test_failures_of_one_request_do_not_change_the_health(error: type[RouterError]) -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.fail(error())

    async with serving(script) as edge:
        status, body, _ = await edge.post("/generate", ASKED)
        assert (status, body["error_type"]) == (424, "generation")
        assert body["error"] == str(error())
        assert (await edge.get("/health"))[0] == 200
        assert len(edge.batcher.requests) == 1
        assert 'tgi_request_failure{err="generation"} 1' in await edge.exposition()


async def test_after_a_failure_only_a_generation_restores_health() -> None:
    async with serving(fail) as edge:
        assert (await edge.post("/generate", ASKED))[0] == 424
        for path in ("/health", "/readyz"):
            status, body, _ = await edge.get(path)
            answer = orjson.loads(body)
            assert status == 503
            assert "out of luck" in answer.pop("reason")
            assert answer == ILL
        assert edge.batcher.requests[-1].max_new_tokens == 1
        edge.batcher.script = echo
        assert (await edge.get("/health"))[0] == 200
        assert edge.batcher.streams[-1].closed
        edge.batcher.script = fail
        assert (await edge.get("/health"))[0] == 200
        assert "tgi_request_count 1" in await edge.exposition()


@pytest.mark.parametrize("parameters", [{}, {"best_of": 2, "do_sample": True}])
async def test_a_generation_restores_health(parameters: dict[str, object]) -> None:
    async with serving(fail) as edge:
        await edge.post("/generate", ASKED)
        edge.batcher.script = echo
        assert (await edge.post("/generate", {"inputs": "a", "parameters": parameters}))[0] == 200
        edge.batcher.script = fail
        assert (await edge.get("/health"))[0] == 200


async def test_after_a_recovery_too_only_a_generation_restores_health() -> None:
    batcher = FakeBatcher()
    health = Health(batcher.status, batcher, probe_seconds=60.0)
    batcher.status.begin_outage(AT_FAULT)
    await health.check()
    batcher.status.end_outage()
    await batcher.arrived.wait()
    batcher.streams[0].fail(GenerationError("no"))
    with pytest.raises(Unhealthy):
        await health.check()
    batcher.script = echo
    await health.check()


async def test_many_checks_are_one_probe() -> None:
    async with serving(fail) as edge:
        await edge.post("/generate", ASKED)
        edge.batcher.script = None
        edge.batcher.arrived.clear()
        probes = [asyncio.create_task(edge.get("/health")) for _ in range(5)]
        await edge.batcher.arrived.wait()
        probes[0].cancel()
        play(edge.batcher.streams[-1], "x")
        assert [(await probe)[0] for probe in probes[1:]] == [200] * 4
        assert len(edge.batcher.streams) == 2


async def test_a_token_of_another_request_stands_in_for_the_probe() -> None:
    batcher = FakeBatcher()
    health = Health(batcher.status, batcher, probe_seconds=60.0)
    health.failed(GenerationError("no"))
    asking = asyncio.create_task(health.check())
    await batcher.arrived.wait()
    # The probe gets no token: it still waits in the queue.
    health.generated()
    await asking
    assert batcher.streams[0].closed


async def test_a_token_of_a_request_reaches_the_flag() -> None:
    async with serving(fail) as edge:
        await edge.post("/generate", ASKED)
        edge.batcher.script = None
        edge.batcher.arrived.clear()
        other = asyncio.create_task(edge.post("/generate", ASKED))
        await edge.batcher.arrived.wait()
        running = edge.batcher.streams[-1]
        running.token(token_event(1, "x"))
        play(running, "y", "z")
        assert (await other)[0] == 200
        assert (await edge.get("/health"))[0] == 200
        assert len(edge.batcher.streams) == 2


async def test_a_probe_may_take_as_long_as_a_recovery() -> None:
    now = 1000.0
    batcher = FakeBatcher()
    health = Health(ShardStatus(60.0, lambda: now), batcher, probe_seconds=0.001)
    health.failed(GenerationError("no"))
    await health.check()
    now += 60.0
    await health.check()
    now += 1.0
    with pytest.raises(Unhealthy) as raised:
        await health.check()
    assert raised.value.reason == "no token has been generated for 61 s"
    assert len(batcher.streams) == 1
    play(batcher.streams[0], "x")
    await health.check()


async def test_a_probe_that_has_failed_is_not_forgotten_while_another_runs() -> None:
    batcher = FakeBatcher()
    health = Health(batcher.status, batcher, probe_seconds=0.001)
    health.failed(GenerationError("no"))
    await health.check()
    batcher.streams[0].fail(ShardsGone("no more"))
    for _ in range(3):
        with pytest.raises(Unhealthy) as raised:
            await health.check()
        assert raised.value.reason == "The model server is down: no more"
    assert len(batcher.streams) == 2


class FullBatcher(FakeBatcher):
    """A batcher whose queue is full, or whose requests expire at once."""

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
    health = Health(batcher.status, batcher, probe_seconds=60.0)
    health.failed(GenerationError("no"))
    asking = asyncio.create_task(health.check())
    await batcher.arrived.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asking.done()
    health.generated()
    await asking


class BrokenBatcher(FakeBatcher):
    """A batcher with a defect."""

    def submit(self, request: ValidRequest) -> TokenStream:
        raise RuntimeError("a defect")


async def test_a_defect_is_not_taken_for_health() -> None:
    batcher = BrokenBatcher()
    health = Health(batcher.status, batcher, probe_seconds=60.0)
    health.failed(GenerationError("no"))
    with pytest.raises(RuntimeError):
        await health.check()


async def test_a_health_check_fails_once_the_shards_do_not_come_back() -> None:
    batcher = FakeBatcher()
    health = Health(batcher.status, batcher, probe_seconds=60.0)
    health.failed(GenerationError("no"))
    asking = asyncio.create_task(health.check())
    await batcher.arrived.wait()
    batcher.status.give_up(AT_FAULT)
    batcher.streams[0].fail(ShardsGone(AT_FAULT))
    with pytest.raises(Unhealthy) as raised:
        await asking
    assert raised.value.reason == f"the shards do not come back: {AT_FAULT}"
