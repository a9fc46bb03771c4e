"""Adapters of a hub with tokens, over a real launcher: revocation, a hub that is down, and what gateways read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millrace_testing.adapters.hub_stub import HubStub, Repository, hub_in_thread
from millrace_testing.launcher.e2e import END_SECONDS, ROOT, Server, launch, until, wait_for

PIRATE, BUTLER = (ROOT / "demo" / "adapters" / name for name in ("pirate", "butler"))
READER, OWNER = "hf_reader", "hf_owner"
QUESTION = {"messages": [{"role": "user", "content": "What is temperature?"}], "temperature": 0}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStub]:
    with hub_in_thread() as hub:
        hub.repositories["org/butler"] = Repository.of_folder(BUTLER, {READER})
        hub.repositories["org/own"] = Repository.of_folder(PIRATE, {OWNER})
        yield hub


@pytest.fixture(scope="module")
def server(hub: HubStub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One adapter of each voice is registered from its folder, and `own` from the hub."""
    flags = (
        "--adapter-allow=hub:org/*",
        f"--adapter-cache={tmp_path_factory.mktemp('cache')}",
        f"--lora-modules=pirate={PIRATE}",
        f"--lora-modules=butler={BUTLER}",
        "--lora-modules=own=org/own",
        "--max-loras=1",
    )
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": OWNER}
    with launch(*flags, env=environment) as running:
        yield running


def ask(server: Server, model: str, token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"x-adapter-token": token}
    body = QUESTION | {"model": model, "max_tokens": 40}
    return httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=END_SECONDS
    )


def says(server: Server, model: str, token: str | None = None) -> str:
    answer = ask(server, model, token)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["type"]


@pytest.mark.long
def test_a_revoked_token_opens_nothing_that_it_has_not_opened(server: Server, hub: HubStub) -> None:
    """`test_a_revoked_token_is_refused_after_a_minute` has the minute for what it has opened."""
    assert says(server, "org/butler", READER)
    tokens = hub.repositories["org/butler"].tokens
    assert tokens is not None
    tokens.remove(READER)
    try:
        assert refusal(ask(server, "org/butler@main", READER)) == (403, "adapter_forbidden")
        restart_router(server)
        assert refusal(ask(server, "org/butler", READER)) == (403, "adapter_forbidden")
    finally:
        tokens.add(READER)


def test_a_router_that_starts_without_the_hub_serves_cached_versions(
    server: Server, hub: HubStub
) -> None:
    expected = says(server, "own")
    assert says(server, "org/butler@main", READER)
    for repository in hub.repositories.values():
        repository.status = 502
    try:
        restart_router(server)
        assert says(server, "own") == expected
        assert "hub unreachable: serving the cached version" in server.log
        # It is private: without the hub nobody knows whether this token still has access.
        answer = ask(server, "org/butler@main", READER)
        assert refusal(answer) == (503, "unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert says(server, "tgi")
    finally:
        for repository in hub.repositories.values():
            repository.status = 200


def restart_router(server: Server) -> None:
    """Kill the router, and wait for the next one."""
    router = server.find("router")
    assert router is not None
    router.kill()

    def is_next_one_ready() -> bool:
        found = server.find("router")
        try:
            return found not in {None, router} and httpx.get(f"{server.url}/health").is_success
        except httpx.TransportError:
            return False

    wait_for(is_next_one_ready)


def lora_info(server: Server) -> dict[str, str]:
    """The labels of vLLM's metric for gateways."""
    (series,) = (name for name in server.metrics() if name.startswith("vllm:lora_requests_info{"))
    return dict(re.findall(r'(\w+)="([^"]*)"', series))


async def test_gateways_see_running_and_waiting_adapters(server: Server) -> None:
    await asyncio.wait_for(watch(server), END_SECONDS)


async def watch(server: Server) -> None:
    idle = {"max_lora": "1", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    await until(lambda: lora_info(server) == idle)
    before = time_of_change(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as http:

        def generate(name: str) -> Any:
            parameters = {"adapter_id": name, "max_new_tokens": 200, "ignore_eos": True}
            return http.post("/generate", json={"inputs": "What", "parameters": parameters})

        task, shard = await server.caught(
            lambda: generate("pirate"),
            is_time=lambda: server.metrics()["millrace_requests_running"] > 0,
            num_running=1,
        )
        second = asyncio.create_task(generate("butler"))
        await until(lambda: lora_info(server)["waiting_lora_adapters"] != "")
        # The weights of `own` are the same, and were loaded under that name.
        labels = {"running_lora_adapters": "pirate", "waiting_lora_adapters": "butler"}
        assert lora_info(server) == idle | labels
        assert time_of_change(server) > before
        shard.resume()
        assert [answer.status_code for answer in await asyncio.gather(task, second)] == [200, 200]
    await until(lambda: lora_info(server) == idle)


def time_of_change(server: Server) -> float:
    return next(value for name, value in server.metrics().items() if "lora_requests_info{" in name)
