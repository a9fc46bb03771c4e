"""Keyed requests against a server whose clock stands still."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.server.idempotent_route import RUNS
from millrace_testing.router.edge import Edge, FakeTimers, finished, serving, token_event

GRACE = 10.0
NUM_TOKENS = 4
ASKED: dict[str, object] = {"inputs": "a", "parameters": {"max_new_tokens": 8}}
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
KEY = {"idempotency-key": "k"}


@asynccontextmanager
async def keyed_edge(
    script: Callable[[ValidRequest, TokenStream], None] | None = None,
    *,
    grace: float = GRACE,
    **options: Any,
) -> AsyncIterator[tuple[Edge, FakeTimers]]:
    """Serve with a clock that stands still; at the end nothing may be left of any request."""
    async with serving(script, template="a", resume_grace=grace, **options) as edge:
        timers = FakeTimers()
        edge.runner.app[RUNS]._call_later = timers
        yield edge, timers
        timers.turn(GRACE)
        async with asyncio.timeout(30):
            await edge.services.infer.permits.all_free()
        assert edge.services.infer.permits.taken == 0
        assert num_runs(edge) == 0
        assert timers.pending == 0


def num_runs(edge: Edge) -> int:
    return len(edge.runner.app[RUNS])


async def until(condition: Callable[[], bool]) -> None:
    """Let the server work until something has come about."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


def is_closed(edge: Edge) -> bool:
    return edge.batcher.streams[0].closed


def readers(edge: Edge) -> int:
    """Connections that read keyed requests."""
    runs = edge.runner.app[RUNS]
    return sum(run.num_readers for run in runs._runs.values())


def all_ended(edge: Edge) -> bool:
    """Whether no keyed request runs any more."""
    return all(run.ended for run in edge.runner.app[RUNS]._runs.values())


def advance(edge: Edge, index: int) -> None:
    """Generate the token of that index, for each prompt."""
    end = finished("whole", NUM_TOKENS) if index == NUM_TOKENS else None
    for stream in edge.batcher.streams:
        stream.token(token_event(index, f" t{index}", finished=end))


@asynccontextmanager
async def streaming(
    edge: Edge, path: str, body: object, **headers: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Ask for a stream; at the end of the block the connection is gone."""
    async with edge.client.post(edge.url + path, json=body, headers=KEY | headers) as response:
        assert response.status == 200
        yield response
        response.close()


def begin(_: ValidRequest, stream: TokenStream) -> None:
    """Generate the first token at once: the status line waits for it."""
    stream.token(token_event(1, " t1"))


async def read_events(response: aiohttp.ClientResponse, count: int) -> bytes:
    return b"".join([await response.content.readuntil(b"\n\n") for _ in range(count)])


def index_of(event: bytes) -> int:
    """Which token an event of `/generate_stream` is, by what it says of it."""
    index = json.loads(event.partition(b"data: ")[2])["index"]
    assert isinstance(index, int)
    return index


def prompts_of(body: dict[str, object]) -> int:
    prompts, n = body.get("prompt"), body.get("n", 1)
    assert isinstance(n, int)
    return n * (len(prompts) if isinstance(prompts, list) else 1)
