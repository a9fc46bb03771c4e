"""Replicas on Ray Serve behind HAProxy: every route, upgrades, scaling, and what dies, all under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import aiohttp
import pytest

from millrace_testing.cluster.load import load
from millrace_testing.cluster.serving import Launched, Served
from millrace_testing.launcher.e2e import END_SECONDS, POLL_SECONDS, until, wait_for

pytestmark = pytest.mark.cluster

CHAT = {"messages": [{"role": "user", "content": "What is a token?"}], "max_tokens": 8, "seed": 1}
INPUTS = {"inputs": "What is a token?", "parameters": {"max_new_tokens": 8}}
ROUTES: tuple[tuple[str, str, Mapping[str, Any] | None], ...] = (
    *(("GET", f"/{page}", None) for page in ("", "health", "ping", "livez", "readyz", "info")),
    *(("GET", f"/{page}", None) for page in ("version", "v1/models", "docs", "openapi.json")),
    ("GET", "/nothing", None),
    ("OPTIONS", "/generate", None),
    ("POST", "/", INPUTS),
    ("POST", "/", {**INPUTS, "stream": True}),
    ("POST", "/generate", INPUTS),
    ("POST", "/generate", {"inputs": 7}),
    ("POST", "/generate_stream", INPUTS),
    ("POST", "/tokenize", {"inputs": "What is a token? " * 3000}),
    ("POST", "/v1/completions", {"prompt": "What is", "max_tokens": 8, "seed": 1}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
    ("POST", "/v1/messages", {**CHAT, "model": "m"}),
    ("POST", "/v1/responses", {"input": "What is a token?", "max_output_tokens": 8}),
)
BY_WAIT = (
    *("max_replicas=3", "upscale_delay_seconds=0", "downscale_delay_seconds=2"),
    *("target_wait_seconds=0.02", "metrics_interval_seconds=1", "max_batch_size=2"),
)
NUM_REPLICAS = 4
VERSION = "max_concurrent_requests=77"
BY_REQUEST = re.compile(
    rb'"(id|item_id|created|created_at|completed_at|request_id|seed)": ?("[^"]*"|[\d.]+)'
)
BY_ANSWER = {
    "date",
    "request-id",
    "x-request-id",
    "x-millrace-stream",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
}


@pytest.fixture(scope="module", autouse=True)
def application(served: Served) -> None:
    """One replica, and up to three by the wait."""
    program = served.serve(*BY_WAIT)
    assert program.process.wait(END_SECONDS) == 0, program.log
    wait_for(lambda: all(served.is_ready(host) for host in served.cluster.hosts))


async def answer_of(url: str, method: str, path: str, body: object) -> tuple[object, ...]:
    """Status, headers and bytes, without what differs from request to request."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, json=body) as response,
    ):
        content = BY_REQUEST.sub(rb'"\1": 0', await response.read())
        headers = {key.lower(): value for key, value in response.headers.items()}
        kept = {k: v for k, v in headers.items() if k not in BY_ANSWER and "time" not in k}
        return response.status, kept, content


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_every_route_answers_like_a_single_launcher(
    served: Served, method: str, path: str, body: Mapping[str, Any] | None
) -> None:
    (launcher,) = served.launchers()
    expected = await answer_of(launcher.url, method, path, body)
    assert await answer_of(served.url, method, path, body) == expected


async def test_replicas_follow_the_wait_under_load(served: Served) -> None:
    async with load(served.url, 1) as few, asyncio.timeout(2 * END_SECONDS):
        async with load(served.url, 12, pause_seconds=0) as many:
            await until(lambda: len(served.launchers()) == 3)
            await many.serves_on()
        await until(lambda: len(served.launchers()) == 1)
        await few.serves_on()
    assert many.errors() == few.errors() == []


async def test_a_new_version_under_load_fails_no_request(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    await served.deploy(f"num_replicas={NUM_REPLICAS}", "max_concurrent_requests=76")
    before = served.launchers()
    assert len(before) == NUM_REPLICAS
    async with load(served.url, 4, num_tokens=4) as clients, asyncio.timeout(2 * END_SECONDS):
        await until(lambda: clients.num_served > 8)
        await served.deploy(f"num_replicas={NUM_REPLICAS}", VERSION)
        await until(lambda: not set(before) & set(served.launchers()))
        await until(lambda: clients.num_served > 2000)
    new = served.launchers()
    assert [launcher.variable("MAX_CONCURRENT_REQUESTS") for launcher in new] == [
        "77"
    ] * NUM_REPLICAS
    assert clients.errors() == []
    record_property("requests_served", clients.num_served)


async def test_a_killed_replica_breaks_only_its_own_streams(served: Served) -> None:
    async with load(served.url, 8) as clients, asyncio.timeout(END_SECONDS):
        await until(lambda: clients.num_served > 8)
        victim = served.launchers()[0]
        os.kill(victim.worker, signal.SIGKILL)
        await until(lambda: not victim.is_listening)
        ended = perf_counter()
        await until(lambda: len(others(served, victim)) == NUM_REPLICAS)
        await clients.serves_on()
    assert clients.errors(since=ended) == []
    assert victim not in served.launchers()


async def test_a_lost_node_breaks_only_its_own_streams(served: Served) -> None:
    lost = served.hosts_by_load()[0]
    clients_of = load(served.url_of_head, 8, num_tokens=200)
    async with clients_of as clients, asyncio.timeout(END_SECONDS):
        await until(lambda: clients.num_served > 8)
        cut = perf_counter()
        lost.cut()
        # Its streams break, too.
        await until(lambda: all(answer.sent > cut for answer in clients.running))
        lost.kill()
        lost.mend()
        await until(lambda: len(served.launchers()) == NUM_REPLICAS)
        await clients.serves_on()
    assert clients.errors(since=cut) == []
    served.cluster.rejoin()


async def test_a_node_that_is_drained_fails_no_request(served: Served) -> None:
    await until(lambda: served.num_ready() == NUM_REPLICAS)
    drained = served.hosts_by_load()[0]
    async with load(served.url_of_head, 4) as clients, asyncio.timeout(END_SECONDS):
        await until(lambda: clients.num_served > 8)
        await asyncio.to_thread(served.cluster.drain, drained)
        counts = []
        while any(launcher.host is drained for launcher in served.launchers()):
            counts.append(served.num_ready())
            await asyncio.sleep(POLL_SECONDS)
        assert min(counts) >= NUM_REPLICAS
        drained.kill()
        await clients.serves_on()
    assert clients.errors() == []


def others(served: Served, victim: Launched) -> list[Launched]:
    return [found for found in served.launchers() if found != victim]
