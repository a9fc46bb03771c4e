"""The load generator: streams generations over HTTP and takes the time of each token's arrival.

It parses server-sent events itself, a chunk at a time. It costs a few microseconds a token, so that it
does not disturb a server on the same machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from millrace.http.client import base_of
from millrace.http.sse import EventReader
from millrace.load.apis import TGI, BadStreamError, Dialect
from millrace.load.levels import Level
from millrace.load.measurement import Timeline

READ_TIMEOUT_SECONDS = 600.0


@dataclass(slots=True)
class RequestOutcome:
    """The requests of one level: a timeline of each success, a reason for each failure."""

    timelines: list[Timeline] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    started: list[Timeline] = field(default_factory=list)
    """Of all requests so far, for those who watch."""


@dataclass(frozen=True, slots=True)
class _Client:
    """The state that all requests of a level share."""

    session: aiohttp.ClientSession
    url: str
    level: Level
    dialect: Dialect
    outcome: RequestOutcome


async def run_level(
    base_url: str,
    level: Level,
    *,
    dialect: Dialect = TGI,
    outcome: RequestOutcome | None = None,
    headers: Mapping[str, str] | None = None,
) -> RequestOutcome:
    """Send every request of the level and wait for all of them; a given `outcome` is filled meanwhile."""
    outcome = RequestOutcome() if outcome is None else outcome
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, force_close=not dialect.keeps_connections)
    async with aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector
    ) as session:
        client = _Client(session, base_of(base_url) + dialect.path, level, dialect, outcome)
        if level.concurrency is not None:
            await _closed_loop(client, level.concurrency)
        else:
            await _open_loop(client)
    return outcome


async def _closed_loop(client: _Client, concurrency: int) -> None:
    prompts = client.level.prompts()

    async def one() -> None:
        for prompt in prompts:
            await _record(client, prompt, due=time.perf_counter())

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(one())


async def _open_loop(client: _Client) -> None:
    level, start = client.level, time.perf_counter()
    async with asyncio.TaskGroup() as requests:
        for offset, prompt in zip(level.arrival_seconds(), level.prompts(), strict=True):
            due = start + offset
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            requests.create_task(_record(client, prompt, due=due))


async def _record(client: _Client, prompt: str, *, due: float) -> None:
    timeline = Timeline(due)
    client.outcome.started.append(timeline)
    try:
        await _stream(client, prompt, timeline)
    except (LookupError, TypeError) as error:
        # A dialect looks for what the events of its API have.
        client.outcome.failures.append(f"an event is not of this API: {error!r}")
    except (BadStreamError, aiohttp.ClientError, TimeoutError) as error:
        client.outcome.failures.append(f"{type(error).__name__}: {error}")
    else:
        client.outcome.timelines.append(timeline)


async def _stream(client: _Client, prompt: str, timeline: Timeline) -> None:
    """Read one stream to its end into `timeline`; raises BadStreamError for an incomplete stream."""
    dialect, level = client.dialect, client.level
    last: dict[str, Any] = {}
    body = dialect.body(prompt, level)
    async with client.session.post(client.url, json=body) as response:
        if response.status != 200:
            raise BadStreamError(f"status {response.status}: {(await response.text())[:200]}")
        async for arrival, event in stamped_events(response):
            if "error" in event:
                raise BadStreamError(f"{event.get('error_type')}: {event['error']}")
            if dialect.usage is not None and (usage := dialect.usage(event)) is not None:
                timeline.usage = usage
            num_new = dialect.num_tokens(event, len(timeline.arrivals))
            timeline.arrivals += [arrival] * num_new
            last = event
    dialect.check_end(last, len(timeline.arrivals))
    if dialect.is_exact and len(timeline.arrivals) != level.new_tokens:
        raise BadStreamError(f"asked for {level.new_tokens} tokens, got {len(timeline.arrivals)}")


async def stamped_events(
    response: aiohttp.ClientResponse,
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yield each `data:` event with the time at which its last byte was read; skip comments."""
    async for arrival, data in stamped_data(response):
        try:
            event = orjson.loads(data)
        except ValueError as error:
            raise BadStreamError(f"an event is no JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise BadStreamError(f"an event is not an object: {data[:80]!r}")
        yield arrival, event


async def stamped_data(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """Yield the data of each event except `[DONE]`, with the time at which its last byte was read."""
    reader = EventReader()
    async for chunk in response.content.iter_any():
        arrival = time.perf_counter()
        for data in reader.feed(chunk):
            yield arrival, data
    if reader.rest:
        raise BadStreamError(f"the stream ended inside an event: {reader.rest[:80]!r}")
