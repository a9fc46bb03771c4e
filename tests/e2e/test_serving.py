"""The whole system on the demo model: launcher, router, shards, real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import httpx
import psutil
import pytest
from bench.faults.streams import Answer, Clients
from tests.ecosystem.operating.first_hour import BLOCKS, recorded_answer

from millrace.verify.__main__ import main as verify
from millrace_testing.launcher.e2e import END_SECONDS, Server, launch, until

LONG = {
    "inputs": "What is decode?",
    "parameters": {"max_new_tokens": 400, "ignore_eos": True},
}
NUM_STREAMS = 20
STREAM = {
    "inputs": "What is a shard?",
    "parameters": {"max_new_tokens": 150, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--deterministic=on", "--max-batch-prefill-tokens=96", "--cpu-threads=2")
    with launch(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    with launch("--dtype=float32", "--max-batch-prefill-tokens=64") as running:
        yield running


@pytest.fixture(scope="module")
def sharded() -> Iterator[Server]:
    with launch("--num-shard=2", "--dtype=float32") as running:
        yield running


async def test_the_recorded_answer_is_what_the_demo_model_answers(server: Server) -> None:
    body, recorded = recorded_answer(BLOCKS["first-answer"])
    async with httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post("/generate", json=body)
    assert answer.json() == json.loads(recorded)


async def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield json.loads(line[5:])


async def generate(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream; checks indexes and the one end."""
    async with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = [event async for event in events_of(response)]
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert [event["generated_text"] is not None for event in events].count(True) == 1
    assert events[-1]["generated_text"] is not None
    return events


def mixed_request(i: int) -> dict[str, Any]:
    """Requests of all kinds: lengths, sampling, penalties, logprobs, stop sequences."""
    parameters: dict[str, Any] = {"max_new_tokens": 5 + (i * 7) % 40, "details": True}
    if i % 2:
        parameters |= {"do_sample": True, "seed": i, "temperature": 0.7 + (i % 5) / 5}
    if i % 3 == 0:
        parameters |= {"repetition_penalty": 1.3, "frequency_penalty": 0.2}
    if i % 5 == 0:
        parameters |= {"top_k": 5 + i, "top_p": 0.9, "seed": i}
    if i % 7 == 0:
        parameters |= {"typical_p": 0.8, "seed": i, "top_n_tokens": 3}
    if i % 11 == 0:
        parameters |= {"stop": ["the", "."]}
    topic = ["prefill", "decode", "a KV cache", "the router", "a shard", "a block"][i % 6]
    return {"inputs": f"What is {topic}? " * (1 + (i * 5) % 17), "parameters": parameters}


def tokens_of(events: list[dict[str, Any]]) -> list[tuple[int, float, Any]]:
    return [(e["token"]["id"], e["token"]["logprob"], e.get("top_tokens")) for e in events]


LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z +[A-Z]+ (?P<logger>[a-z0-9_.-]+): (?P<text>.*)"
)
"""Any line of the log at a start, of whichever process."""
MOST_LINES = 20


def test_the_log_of_a_start_fits_a_screen(server: Server) -> None:
    shown = server.log.partition("\n\n")[0].splitlines()
    found = [LINE.fullmatch(line) for line in shown if "compil" not in line]
    assert None not in found, server.log
    lines = [line for line in found if line is not None]
    assert {line["logger"].partition(".")[0] for line in lines} == {
        "millrace_launcher",
        "millrace_shard",
        "millrace_router",
    }
    texts = [line["text"] for line in lines if not line["text"].startswith("Waiting")]
    assert 0 < len(texts) <= MOST_LINES, server.log
    assert len(set(texts)) == len(texts), server.log


async def test_64_mixed_streams_equal_the_same_requests_one_by_one(server: Server) -> None:
    bodies = [mixed_request(i) for i in range(64)]
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS, limits=limits) as client:
        together = await asyncio.gather(*(generate(client, body) for body in bodies))
        alone = [await generate(client, body) for body in bodies]
    for i, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert tokens_of(one) == tokens_of(other), f"request {i} depends on its batch"
        assert one[-1]["generated_text"] == other[-1]["generated_text"]


def blocks_in_use(server: Server) -> float:
    return server.metrics()["millrace_kv_blocks_in_use"]


def num_finished(server: Server) -> float:
    return server.metrics().get("tgi_request_generated_tokens_count", 0.0)


async def test_a_client_that_leaves_a_stream_frees_its_blocks(server: Server) -> None:
    await until(lambda: blocks_in_use(server) == 0)
    before = num_finished(server)
    async with Clients(server.url) as clients:

        def send() -> Coroutine[Any, Any, list[Answer]]:
            clients.answers = []
            return clients.send_all([LONG])

        stream, shard = await server.caught(
            send, is_time=lambda: clients.num_tokens > 0, num_running=1
        )
        before = num_finished(server)
        assert blocks_in_use(server) > 0
        stream.cancel()
        await asyncio.wait([stream])
    shard.resume()
    await until(lambda: blocks_in_use(server) == 0)
    assert server.metrics()["millrace_requests_running"] == 0
    assert num_finished(server) == before


async def test_a_client_that_leaves_a_plain_request_frees_its_blocks(server: Server) -> None:
    before = num_finished(server)
    with server.held():
        async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as client:
            request = asyncio.create_task(client.post("/generate", json=LONG))
            await until(lambda: blocks_in_use(server) > 0)
            request.cancel()
            await asyncio.wait([request])
    await until(lambda: blocks_in_use(server) == 0)
    assert num_finished(server) == before


def test_chat_answers_a_question_and_stops_by_itself(server: Server) -> None:
    body = {
        "model": "tgi",
        "messages": [{"role": "user", "content": "What is prefill?"}],
        "max_tokens": 100,
        "temperature": 0,
    }
    url = f"{server.url}/v1/chat/completions"
    answer = httpx.post(url, json=body, timeout=END_SECONDS).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "prompt" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["total_tokens"] > answer["usage"]["prompt_tokens"] > 0


async def test_a_text_scores_as_it_did_when_it_was_generated(server: Server) -> None:
    """In chunks as a prompt, and token by token: the same numbers, the same candidates."""
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as client:
        text = "What is a KV cache? " * 4
        told = await client.post(
            "/generate",
            json={
                "inputs": text,
                "parameters": {
                    "max_new_tokens": 250,
                    "ignore_eos": True,
                    "details": True,
                    "top_n_tokens": 2,
                },
            },
        )
        tokenized = await client.post("/tokenize", json={"prompt": text})
        details = told.json()["details"]
        prompt, generated = tokenized.json()["tokens"], [token["id"] for token in details["tokens"]]
        scored = await client.post(
            "/v1/completions",
            json={"prompt": prompt + generated, "echo": True, "logprobs": 2, "max_tokens": 0},
        )
    (choice,) = scored.json()["choices"]
    columns = choice["logprobs"]
    assert choice["finish_reason"] == "length"
    assert len(columns["tokens"]) == len(prompt) + 250 > 2 * 96
    assert columns["token_logprobs"][0] is None
    assert columns["token_logprobs"][len(prompt) :] == [t["logprob"] for t in details["tokens"]]
    for top, candidates in zip(
        columns["top_logprobs"][len(prompt) :], details["top_tokens"], strict=True
    ):
        assert list(top.values())[:2] == [token["logprob"] for token in candidates[:2]]


def test_a_running_server_is_checked_from_outside(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(["--json", server.url, "--requests=6", "--max-new-tokens=16"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    checked = {row["case"] for row in rows if row["verdict"] != "not_checked"}
    assert checked == {"batched", "cached"}


def test_two_tensor_parallel_shards_answer_like_one(single: Server, sharded: Server) -> None:
    body = {"inputs": "What is decode?", "parameters": {"max_new_tokens": 30, "details": True}}
    answers = [
        httpx.post(f"{one.url}/generate", json=body, timeout=END_SECONDS).json()
        for one in (single, sharded)
    ]
    ids = [[token["id"] for token in answer["details"]["tokens"]] for answer in answers]
    assert ids[0] == ids[1]
    assert answers[0]["generated_text"] == answers[1]["generated_text"]


def children_of(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


async def test_sigterm_lets_20_streams_finish_and_exits_0(single: Server) -> None:
    children = children_of(single)
    async with Clients(single.url) as clients:

        def send() -> Coroutine[Any, Any, list[Answer]]:
            clients.answers = []
            return clients.send_all([STREAM] * NUM_STREAMS)

        def is_time() -> bool:
            begun = [answer for answer in clients.answers if answer.events]
            return len(begun) == NUM_STREAMS

        streams, shard = await single.caught(send, is_time=is_time, num_running=NUM_STREAMS)
        single.process.send_signal(signal.SIGTERM)
        await until(lambda: "Draining" in single.log)
        shard.resume()
        answers = await streams
    assert [(answer.error, len(answer.events)) for answer in answers] == [("", 150)] * NUM_STREAMS
    assert all(answer.is_whole for answer in answers)
    assert await asyncio.to_thread(single.process.wait, END_SECONDS) == 0
    assert psutil.wait_procs(children, timeout=END_SECONDS)[1] == []
    assert list(single.sockets.iterdir()) == []


def test_killing_the_launcher_leaves_no_orphan(sharded: Server) -> None:
    children = children_of(sharded)
    assert len(children) - (sharded.find("spare") is not None) == 6, (
        "two shards, the two processes they are forked of, the router and the guard"
    )
    sharded.process.kill()
    assert psutil.wait_procs(children, timeout=END_SECONDS)[1] == []
    assert not list(sharded.sockets.glob("shard-*[0-9]"))
