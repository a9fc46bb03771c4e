"""nginx, HAProxy and Envoy with the files in deploy/, before the router's HTTP edge."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.ecosystem.operating.proxies import PROXIES, Proxy, fronting
from yarl import URL

from millrace_testing.router.edge import finished, token_event

pytestmark = pytest.mark.ecosystem

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 3}}
STREAM_SECONDS = int(os.environ.get("MILLRACE_PROXIED_STREAM_SECONDS", "20"))
"""Longer than Envoy's usual limit of an answer, 15 s."""


@pytest.mark.parametrize("proxy", PROXIES, ids=str)
def test_the_program_accepts_its_file(proxy: Proxy, tmp_path: Path) -> None:
    arguments = proxy.write(tmp_path, 8443, ["127.0.0.1:3000", "127.0.0.1:3001"])
    checked = subprocess.run(
        [proxy.program(), *proxy.check, *arguments], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert not re.search("warn|alert", checked.stderr, re.IGNORECASE), checked.stderr


@pytest.mark.parametrize("proxy", PROXIES, ids=str)
@pytest.mark.parametrize("route", ["/generate_stream", "/v1/completions"])
async def test_each_token_arrives_before_the_next_is_made(
    proxy: Proxy, route: str, tmp_path: Path
) -> None:
    body = ASKED if route == "/generate_stream" else {"prompt": "a", "stream": True}
    async with fronting(proxy, tmp_path) as front:
        asking = asyncio.create_task(front.client.post(front.url + route, json=body))
        stream = await front.streams[0].get()
        for index, word in enumerate(("x", "y", "z"), start=1):
            end = finished("xyz", 3) if word == "z" else None
            stream.token(token_event(index, word, finished=end))
            # The next token is not sent before this one has come through.
            answer = await asking
            event = await answer.content.readuntil(b"\n\n")
            assert f'"text":"{word}"'.encode() in event
            assert answer.status == 200
            if end is not None:
                await answer.read()


async def test_a_long_stream_and_a_long_answer_have_no_time_limit(tmp_path: Path) -> None:
    async def long(proxy: Proxy, folder: Path) -> None:
        folder.mkdir()
        async with fronting(proxy, folder, seconds=2 * STREAM_SECONDS) as front:
            streamed = asyncio.create_task(
                front.client.post(f"{front.url}/generate_stream", json=ASKED)
            )
            stream = await front.streams[0].get()
            whole = asyncio.create_task(front.client.post(f"{front.url}/generate", json=ASKED))
            silent = await front.streams[0].get()
            for second in range(1, STREAM_SECONDS + 1):
                stream.token(token_event(second, "x"))
                await asyncio.sleep(1)
            end = finished("xy", STREAM_SECONDS + 1)
            stream.token(token_event(STREAM_SECONDS + 1, "y", finished=end))
            silent.token(token_event(1, "z", finished=finished("z", 1)))
            body = await (await streamed).read()
            assert body.count(b'"text":"x"') == STREAM_SECONDS
            assert b'"generated_text":"xy"' in body
            assert b'"generated_text":"z"' in await (await whole).read()

    await asyncio.gather(*(long(proxy, tmp_path / proxy.name) for proxy in PROXIES))


@pytest.mark.parametrize("proxy", PROXIES, ids=str)
@pytest.mark.parametrize("route", ["/generate_stream", "/generate"])
async def test_a_client_that_leaves_ends_its_request(
    proxy: Proxy, route: str, tmp_path: Path
) -> None:
    async with fronting(proxy, tmp_path) as front:
        body = json.dumps(ASKED)
        reader, writer = await asyncio.open_connection("localhost", front.port, ssl=front.trusting)
        head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        stream = await front.streams[0].get()
        gone = asyncio.Event()
        stream.when_closed(gone.set)
        if route == "/generate_stream":
            stream.token(token_event(1, "x"))
            await reader.readuntil(b'"text":"x"')
        writer.transport.abort()
        await gone.wait()


@pytest.mark.parametrize("proxy", PROXIES, ids=str)
async def test_metrics_stay_inside(proxy: Proxy, tmp_path: Path) -> None:
    async with fronting(proxy, tmp_path) as front:
        async with front.client.get(f"{front.url}/metrics") as answer:
            assert answer.status == 403
        # HAProxy and Envoy take this for another path; the router does not.
        disguised = URL(f"{front.url}/%6detrics", encoded=True)
        async with front.client.get(disguised) as answer:
            assert answer.status in {403, 404}
        async with front.client.get(f"{front.url}/livez") as answer:
            assert answer.status == 200
