"""The load generator: streams generations over HTTP and stamps each token as it arrives.

Reads `/generate_stream` events itself, a chunk at a time, so that the generator costs a few
microseconds a token and does not disturb the server with which it shares the machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from bench.levels import Level
from bench.measurement import Timeline

STREAM_PATH = "/generate_stream"
READ_TIMEOUT_SECONDS = 600.0


class BadStreamError(Exception):
    """The server answered, but not with the stream that was asked for."""


@dataclass(slots=True)
class Outcome:
    """The requests of one level: timelines of the good ones, a reason for each bad one."""

    timelines: list[Timeline] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


async def run_level(base_url: str, level: Level) -> Outcome:
    """Send every request of the level and wait until each has ended."""
    outcome = Outcome()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_SECONDS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        base_url=base_url, timeout=timeout, connector=connector
    ) as session:
        if level.concurrency is not None:
            await _closed_loop(session, level, outcome, concurrency=level.concurrency)
        else:
            await _open_loop(session, level, outcome)
    return outcome


async def _closed_loop(
    session: aiohttp.ClientSession, level: Level, outcome: Outcome, *, concurrency: int
) -> None:
    prompts = level.prompts()

    async def client() -> None:
        for prompt in prompts:
            await _record(session, level, outcome, prompt=prompt, due=time.perf_counter())

    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(client())


async def _open_loop(session: aiohttp.ClientSession, level: Level, outcome: Outcome) -> None:
    start = time.perf_counter()
    async with asyncio.TaskGroup() as requests:
        for offset, prompt in zip(level.arrival_seconds(), level.prompts(), strict=True):
            due = start + offset
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            requests.create_task(_record(session, level, outcome, prompt=prompt, due=due))


async def _record(
    session: aiohttp.ClientSession, level: Level, outcome: Outcome, *, prompt: str, due: float
) -> None:
    timeline = Timeline(due)
    try:
        await _stream(session, level, timeline, prompt=prompt)
    except (BadStreamError, aiohttp.ClientError, TimeoutError) as error:
        outcome.failures.append(f"{type(error).__name__}: {error}")
    else:
        outcome.timelines.append(timeline)


async def _stream(
    session: aiohttp.ClientSession, level: Level, timeline: Timeline, *, prompt: str
) -> None:
    """Read one stream to its end into `timeline`; raises BadStreamError when it is not whole."""
    body = {
        "inputs": prompt,
        "parameters": {
            "max_new_tokens": level.new_tokens,
            "ignore_eos": True,
            "details": True,
            "do_sample": False,
        },
    }
    last: dict[str, Any] = {}
    async with session.post(STREAM_PATH, json=body) as response:
        if response.status != 200:
            raise BadStreamError(f"status {response.status}: {(await response.text())[:200]}")
        async for arrival, event in _events(response):
            if "error" in event:
                raise BadStreamError(f"{event.get('error_type')}: {event['error']}")
            timeline.arrivals.append(arrival)
            if event["index"] != len(timeline.arrivals):
                raise BadStreamError(f"token {event['index']} came as {len(timeline.arrivals)}")
            last = event
    _check_end(last, level, num_tokens=len(timeline.arrivals))


def _check_end(last: dict[str, Any], level: Level, *, num_tokens: int) -> None:
    details = last.get("details")
    if not details or last.get("generated_text") is None:
        raise BadStreamError(f"the stream stopped after {num_tokens} tokens without an end")
    if details["generated_tokens"] != num_tokens or num_tokens != level.new_tokens:
        raise BadStreamError(
            f"asked for {level.new_tokens} tokens, got {num_tokens} events,"
            f" details say {details['generated_tokens']} ({details['finish_reason']})"
        )


async def _events(
    response: aiohttp.ClientResponse,
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yield each `data:` event with the moment its last byte was read; comments are skipped."""
    buffer = b""
    async for chunk in response.content.iter_any():
        arrival = time.perf_counter()
        *blocks, buffer = (buffer + chunk).split(b"\n\n")
        for block in blocks:
            if block.startswith(b"data:"):
                yield arrival, orjson.loads(block[5:])
    if buffer.strip():
        raise BadStreamError(f"the stream ended inside an event: {buffer[:80]!r}")
