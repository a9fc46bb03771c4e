"""Ten times as much as the server takes, and thousands of connections that ask for nothing."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import psutil
import pytest

from millrace_testing.launcher.e2e import END_SECONDS, Server, launch, until

CAPACITY = 8
QUEUE = 4
CLIENTS = 10 * CAPACITY
ROUNDS = 3
NUM_IDLE = 2000
NUM_SLOW = 500
CONNECTING_AT_ONCE = 100
MAX_GROWTH = 128 * 2**20
"""Bytes that the router may grow by: the allocator's own slack, and far below what unbounded queues would hold."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = (f"--max-concurrent-requests={CAPACITY}", f"--max-queue-size={QUEUE}")
    with launch("--deterministic=on", "--max-batch-size=4", *flags) as running:
        yield running


def router_of(server: Server) -> psutil.Process:
    """The process that listens."""
    router = server.find("router")
    assert router is not None
    return router


def is_idle(server: Server) -> bool:
    metrics = server.metrics()
    busy = ("millrace_kv_blocks_in_use", "millrace_requests_running", "tgi_queue_size")
    return not any(metrics[name] for name in busy)


def body_of(i: int) -> dict[str, Any]:
    """One of a few seeded requests."""
    parameters = {"max_new_tokens": 24 + 4 * i, "ignore_eos": True, "do_sample": True, "seed": i}
    return {"inputs": f"What is a block? {i}", "parameters": parameters}


async def ask(client: httpx.AsyncClient, i: int, *, stream: bool) -> httpx.Response:
    path = "/generate_stream" if stream else "/generate"
    return await client.post(path, json=body_of(i))


def text_of(response: httpx.Response) -> str:
    """The whole text of either kind of answer, after checking that a stream has one end."""
    if "event-stream" not in response.headers["content-type"]:
        return str(response.json()["generated_text"])
    events = [json.loads(line[5:]) for line in response.text.splitlines() if line]
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["generated_text"] is None for event in events[:-1]] == [True] * (len(events) - 1)
    tokens = [event["token"] for event in events]
    whole = str(events[-1]["generated_text"])
    assert "".join(token["text"] for token in tokens if not token["special"]) == whole
    return whole


async def test_ten_times_the_capacity_is_answered_exactly_or_refused_with_429(
    server: Server,
) -> None:
    """In rounds, each of which begins with a shard that answers nothing, so that all of them ask at once."""
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS, limits=limits) as client:
        alone = [text_of(await ask(client, i, stream=False)) for i in range(CAPACITY)]
        await until(lambda: is_idle(server))
        blocks = server.metrics()["millrace_kv_blocks"]
        router = router_of(server)
        before, peak = router.memory_info().rss, 0
        refused = 0

        async def insist(i: int, *, stream: bool) -> None:
            nonlocal refused, peak
            response = await ask(client, i, stream=stream)
            peak = max(peak, router.memory_info().rss)
            if response.status_code == 200:
                assert text_of(response) == alone[i]
                return
            refused += 1
            assert response.status_code == 429, response.text
            assert response.json()["error_type"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1

        def is_full() -> bool:
            return refused >= CLIENTS - CAPACITY

        for turn in range(ROUNDS):
            await until(lambda: is_idle(server))
            refused = 0
            async with asyncio.TaskGroup() as clients:
                with server.held():
                    for number in range(CLIENTS):
                        i, stream = (number + turn) % CAPACITY, number % 2 == 0
                        clients.create_task(insist(i, stream=stream))
                    await until(is_full)
            # The requests that fit the queue are always accepted.
            assert QUEUE <= CLIENTS - refused <= CAPACITY
        assert peak - before < MAX_GROWTH
        await until(lambda: is_idle(server))
        assert server.metrics()["millrace_kv_blocks"] == blocks
        assert [text_of(await ask(client, i, stream=True)) for i in range(CAPACITY)] == alone


def raised_file_limit(wanted: int) -> bool:
    """Whether this process may have so many files open; its limit is raised as far as it may be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in {resource.RLIM_INFINITY} and hard < wanted:
        return False
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True


async def test_idle_connections_and_slow_senders_block_no_other_client(server: Server) -> None:
    if not raised_file_limit(NUM_IDLE + NUM_SLOW + 500):
        pytest.skip("too few files may be open")
    router = router_of(server)
    await until(lambda: is_idle(server))
    before, files = router.memory_info().rss, router.num_fds()
    turnstile = asyncio.Semaphore(CONNECTING_AT_ONCE)

    async with AsyncExitStack() as connections:

        async def connect(head: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            async with turnstile:
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            connections.callback(writer.close)
            writer.write(head)
            return reader, writer

        await asyncio.gather(*(connect(b"") for _ in range(NUM_IDLE)))
        head = b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: "
        slow = await asyncio.gather(*(connect(head) for _ in range(NUM_SLOW)))
        for _, writer in slow:
            writer.write(b"a")
        # Every connection is the router's by now, and not just the kernel's.
        await until(lambda: router.num_fds() > NUM_IDLE + NUM_SLOW)
        async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as client:
            assert (await client.get("/health")).status_code == 200
            answers = await asyncio.gather(*(ask(client, i, stream=True) for i in range(3)))
            assert [answer.status_code for answer in answers] == [200] * 3
        for reader, writer in slow[:20]:
            writer.write(b"\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert router.memory_info().rss - before < MAX_GROWTH
    await until(lambda: router.num_fds() <= files)
    await until(lambda: is_idle(server))
