"""HAProxy and Envoy before two servers: bytes, and the choice of the server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.ecosystem.operating.proxies import BALANCERS, Front, Proxy, fronting, prefixed
from tests.router.api.test_openapi import BODIES, STREAM, STREAMS

from millrace_router.api.openapi.document import OPERATIONS
from millrace_testing.router.edge import echo, finished, token_event

pytestmark = pytest.mark.ecosystem

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 3}}
OF_THIS_ANSWER = re.compile(
    rb'("(id|request_id|item_id)": ?")[^"]*"|("(created|created_at|completed_at)": ?)[0-9.]+'
    rb"|([0-9.]+e-?[0-9]+)"
)
"""Names, times and measured durations, which differ between two answers to one request."""
HOP_BY_HOP = {"date", "connection", "keep-alive", "transfer-encoding", "content-length"}
OF_THIS_REQUEST = {
    "x-request-id",
    "request-id",
    "x-compute-time",
    "x-total-time",
    "x-validation-time",
} | {
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
}


def stable_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that do not depend on the connection or on the moment."""
    left_out = HOP_BY_HOP | OF_THIS_REQUEST
    return {name.lower(): value for name, value in headers.items() if name.lower() not in left_out}


async def asked(
    front: Front, url: str, method: str, path: str, body: object
) -> tuple[int, dict[str, str], bytes]:
    """Status, stable headers and stable bytes of an answer."""
    async with front.client.request(method, url + path, json=body) as answer:
        found = await answer.read()
    return answer.status, stable_headers(answer.headers), OF_THIS_ANSWER.sub(b"", found)


@pytest.mark.parametrize("proxy", BALANCERS, ids=str)
async def test_every_route_is_byte_identical(proxy: Proxy, tmp_path: Path) -> None:
    async with fronting(proxy, tmp_path, script=echo) as front:
        direct = front.edges[0].url
        cases: list[tuple[str, str, object]]
        cases = [(one.method, one.path, BODIES.get(one.id)) for one in OPERATIONS]
        streams = [one for one in OPERATIONS if one.id in STREAMS]
        cases += [(one.method, one.path, STREAMS[one.id] | STREAM) for one in streams]
        cases += [("get", "/nothing", None), ("put", "/generate", ASKED), ("post", "/generate", [])]
        seen = 0
        for method, route, body in cases:
            # It changes from answer to answer, and is closed to the outside.
            if route in {"/metrics", "/status", "/status.json"}:
                continue
            path = re.sub("{[^}]*}", "none", route)
            expected = await asked(front, direct, method, path, body)
            assert await asked(front, front.url, method, path, body) == expected, path
            seen += 1
        assert seen > 40


@pytest.mark.parametrize("proxy", BALANCERS, ids=str)
async def test_prompts_that_begin_alike_go_to_one_server(proxy: Proxy, tmp_path: Path) -> None:
    async with fronting(proxy, tmp_path, num_edges=2, script=echo) as front:
        places: dict[int, set[int]] = {}
        for number in range(12):
            for rest in range(3):
                before = [len(edge.batcher.requests) for edge in front.edges]
                body = prefixed(number, rest)
                async with front.client.post(f"{front.url}/generate", json=body) as answer:
                    assert answer.status == 200
                after = [len(edge.batcher.requests) for edge in front.edges]
                (place,) = (one for one in range(2) if after[one] > before[one])
                places.setdefault(number, set()).add(place)
        assert all(len(found) == 1 for found in places.values())
        assert set.union(*places.values()) == {0, 1}


@pytest.mark.parametrize("proxy", BALANCERS, ids=str)
async def test_load_is_bounded_even_for_one_prompt(proxy: Proxy, tmp_path: Path) -> None:
    async with fronting(proxy, tmp_path, num_edges=2) as front:
        num_streams = 40
        url, body = f"{front.url}/generate_stream", prefixed(1, 1)
        asking = []
        for number in range(1, num_streams + 1):
            asking.append(asyncio.create_task(front.client.post(url, json=body)))
            while sum(queue.qsize() for queue in front.streams) < number:
                await asyncio.sleep(0.005)
        most = max(queue.qsize() for queue in front.streams)
        assert most <= 1.25 * num_streams / 2 + 1
        for queue in front.streams:
            while queue.qsize():
                queue.get_nowait().token(token_event(1, "x", finished=finished("x", 1)))
        for answer in await asyncio.gather(*asking):
            assert b"generated_text" in await answer.read()


def test_bodies_are_those_of_this_test() -> None:
    for number in range(3):
        first, second = (json.dumps(prefixed(number, rest))[:2048] for rest in (1, 2))
        assert first == second
