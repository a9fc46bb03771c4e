"""A model with recurrent layers through the whole server: alone, in company, over shared prefixes and kills."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from bench.faults.streams import Answer, Clients, differences, mixed_bodies

from millrace_testing.launcher.e2e import END_SECONDS, Server, launch
from millrace_testing.models.tiny_models import save_with_tokenizer

STREAMS = mixed_bodies(8, longest=150)
SHARED = " ".join(["A block holds a fixed number of positions."] * 75)


DRAFTS = pytest.param(("--speculate=3",), id="drafts", marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[pytest.param((), id="plain"), DRAFTS])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("hybrid")
    save_with_tokenizer(folder, "qwen3_next")
    flags = "--deterministic=on", "--max-restarts=1000", *request.param
    with launch(f"--model-id={folder}", *flags) as running:
        yield running


@pytest.mark.long
async def test_kills_change_no_token_of_streams_in_company(server: Server) -> None:
    async with Clients(server.url) as clients:
        alone = list[Answer]()
        for body in STREAMS:
            clients.answers = []
            alone += await clients.send_all([body])
        clients.answers = []
        assert differences(alone, await clients.send_all(STREAMS)) == []
        middle = sum(len(answer.events) for answer in alone) // 2

        def send() -> Coroutine[Any, Any, list[Answer]]:
            clients.answers = []
            return clients.send_all(STREAMS)

        for _ in range(2):
            task, shard = await server.caught(
                send, is_time=lambda: clients.num_tokens > middle, num_running=len(STREAMS)
            )
            psutil.Process.kill(shard)
            assert differences(alone, await task) == []
    assert server.metrics()['millrace_recoveries_total{reason="lost"}'] == 2


def test_the_second_prompt_with_a_prefix_computes_little_of_it(server: Server) -> None:
    def computed(text: str) -> tuple[float, str]:
        before = server.metrics().get("millrace_prefill_tokens_total", 0)
        body = {"inputs": text, "parameters": {"max_new_tokens": 8}}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=END_SECONDS)
        assert answer.status_code == 200, answer.text
        count = server.metrics()["millrace_prefill_tokens_total"] - before
        return count, answer.json()["generated_text"]

    assert computed(SHARED + " What is a page?")[0] > 600
    count, text = computed(SHARED + " Who owns a router?")
    assert count < 128
    count, same = computed(SHARED + " Who owns a router?")
    assert count <= 64
    assert same == text


def test_pages_of_states_are_counted(server: Server) -> None:
    metrics = server.metrics()
    assert metrics["millrace_state_pages"] > 1
    assert metrics["millrace_state_pages_in_use"] == 0
    assert metrics["millrace_state_copies"] > 0
