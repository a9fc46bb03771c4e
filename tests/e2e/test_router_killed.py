"""The router of the demo model is killed while clients with keys read: they get the rest, on every route."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from millrace_testing.launcher.e2e import END_SECONDS, Server, launch, until
from millrace_testing.router.keyed import choices_of, clients, ids_of, read_all

KILLS = 2
WAITS = "A second router waits"
BLOCK_SIZE = 64
"""KV positions, on CPU."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with launch("--deterministic=on") as running:
        yield running


def other_router(server: Server, old: psutil.Process) -> psutil.Process | None:
    """The router, unless it is the `old` one."""
    router = server.find("router")
    return None if router is None or router.pid == old.pid else router


async def test_keyed_answers_outlive_a_killed_router(server: Server) -> None:
    await read_all(server.url, "warm")
    undisturbed = await read_all(server.url, "whole")
    for kill in range(KILLS):
        if kill == KILLS - 1:
            await until(lambda: WAITS in server.log)
        asked = clients()
        async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
            reading = [asyncio.create_task(one.read(http, f"cut{kill}")) for one in asked]
            streams = [one for one in asked if one.path != "/generate"]
            await asyncio.gather(*(one.has_read.wait() for one in streams))
            router = server.find("router")
            assert router is not None
            with server.held():
                router.kill()
                await asyncio.gather(*reading)
            if kill == KILLS - 1:
                # The next one dies, too, at any point of its start.
                second = await until(partial(other_router, server, router))
                assert second is not None
                second.kill()
            assert any(
                one.num_events < len(ids_of(two.text))
                for one, two in zip(asked, undisturbed, strict=True)
            )
        async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
            await asyncio.gather(*(one.read_rest(http, f"cut{kill}") for one in asked))
        for one, other in zip(asked, undisturbed, strict=True):
            assert one.status == 200, one.text
            assert ids_of(one.text) == ids_of(other.text), one.path
            assert choices_of(one.text) == choices_of(other.text), one.path


async def test_the_second_router_takes_over_with_the_keys_that_hold_now(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a:sk-revoked")
    with launch(f"--api-key-file={keys}") as server:
        await until(lambda: WAITS in server.log)
        router, spare = server.find("router"), server.find("spare")
        assert router is not None
        assert spare is not None
        keys.write_text("a:sk-new")
        router.kill()
        statuses = []
        async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
            for key in ("sk-revoked", "sk-new"):
                headers = {"authorization": f"Bearer {key}"}
                answer = await http.post("/generate", json={"inputs": "a"}, headers=headers)
                statuses.append(answer.status_code)
        assert statuses == [401, 200]
        serving = server.find("router")
        assert serving is not None
        assert serving.pid == spare.pid


async def test_another_tenant_does_not_get_the_rest(server: Server) -> None:
    (client, *_) = clients()
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
        reading = asyncio.create_task(client.read(http, "mine"))
        await client.has_read.wait()
        router = server.find("router")
        assert router is not None
        router.kill()
        await reading
    await until(lambda: server.find("router"))
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
        headers = client.headers("mine") | {"last-event-id": "3", "x-tenant": "another"}
        answer = await http.post(client.path, json=client.body, headers=headers)
        assert (answer.status_code, answer.json()["error_type"]) == (410, "not_resumable")
        await client.read_rest(http, "mine")
    assert client.status == 200
    assert ids_of(client.text) == list(range(1, 121))


async def test_prompts_that_were_seen_before_a_kill_are_not_computed_again(server: Server) -> None:
    body = {"prompt": "The blocks outlive it. " * 40, "max_tokens": 4, "temperature": 0}

    async def ask() -> tuple[dict[str, Any], float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
            before = await computed(http)
            answer = await http.post("/v1/completions", json=body)
            return answer.json(), await computed(http) - before

    whole, num_computed = await ask()
    num_prompt = whole["usage"]["prompt_tokens"]
    assert num_computed == num_prompt > 3 * BLOCK_SIZE
    router = server.find("router")
    assert router is not None
    router.kill()
    await until(partial(other_router, server, router))
    again, num_computed = await ask()
    assert again["choices"] == whole["choices"]
    num_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_computed == num_prompt - num_cached


async def computed(http: httpx.AsyncClient) -> float:
    """Prompt tokens that the router has had computed."""
    text = (await http.get("/metrics")).text
    return sum(
        float(count) for count in re.findall(r"^millrace_prefill_tokens_total (.*)$", text, re.M)
    )
