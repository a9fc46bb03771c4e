"""The whole system on the demo model: launcher, router, shards, real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest

from millrace_e2e import Server, launch

LONG = 400


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with launch("--deterministic=on", "--max-batch-prefill-tokens=96") as running:
        yield running


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


async def test_64_mixed_streams_equal_the_same_requests_alone(server: Server) -> None:
    bodies = [mixed_request(i) for i in range(64)]
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        together = await asyncio.gather(*(generate(client, body) for body in bodies))
        alone = [await generate(client, body) for body in bodies]
    for i, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert tokens_of(one) == tokens_of(other), f"request {i} depends on its company"
        assert one[-1]["generated_text"] == other[-1]["generated_text"]


def wait_for(condition: Any, *, seconds: float = 20) -> None:
    """Poll until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def blocks_in_use(server: Server) -> float:
    return server.metrics()["millrace_kv_blocks_in_use"]


def num_finished(server: Server) -> float:
    return server.metrics().get("tgi_request_generated_tokens_count", 0.0)


def test_a_client_that_leaves_a_stream_frees_its_blocks(server: Server) -> None:
    wait_for(lambda: blocks_in_use(server) == 0)
    before = num_finished(server)
    body = {
        "inputs": "What is prefill?",
        "parameters": {"max_new_tokens": LONG, "ignore_eos": True},
    }
    with (
        server.held(),
        httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=60) as response,
    ):
        assert response.status_code == 200
        wait_for(lambda: blocks_in_use(server) > 0)
    wait_for(lambda: blocks_in_use(server) == 0)
    assert server.metrics()["millrace_requests_running"] == 0
    assert num_finished(server) == before


def test_a_client_that_leaves_a_plain_request_frees_its_blocks(server: Server) -> None:
    before = num_finished(server)
    body = {"inputs": "What is decode?", "parameters": {"max_new_tokens": LONG, "ignore_eos": True}}
    with server.held(), pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/generate", json=body, timeout=httpx.Timeout(60, read=0.3))
    wait_for(lambda: blocks_in_use(server) == 0)
    assert num_finished(server) == before


BAD_BODIES = [
    pytest.param(b"{", 400, id="cut off"),
    pytest.param(b'{"inputs": NaN}', 400, id="not JSON"),
    pytest.param(b"[" * 10_000 + b"]" * 10_000, 400, id="10 000 deep"),
    pytest.param(b'{"inputs": "\xff\xfe"}', 400, id="bad UTF-8"),
    pytest.param(b'{"inputs": 5}', 422, id="wrong type"),
    pytest.param(b'{"inputs": ""}', 422, id="empty"),
    pytest.param(b"{}", 422, id="nothing"),
    pytest.param(b'{"inputs": "x", "parameters": {"temperature": -1}}', 422, id="range"),
    pytest.param(b'{"inputs": "' + b"word " * 200_000 + b'"}', 422, id="1 MB prompt"),
    pytest.param(b'{"inputs": "' + b"x" * 3_000_000 + b'"}', 413, id="oversize"),
]


@pytest.mark.parametrize(("body", "status"), BAD_BODIES)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/tokenize"])
def test_bad_input_gets_a_typed_error(server: Server, path: str, body: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=60)
    if path == "/tokenize" and response.status_code == 200:
        return  # Lengths and parameters are not its business.
    assert response.status_code == status
    assert set(response.json()) == {"error", "error_type"}
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("body", [b"{", b"[" * 10_000, b'{"prompt": 5, "messages": 5}', b"\xff"])
def test_bad_openai_input_gets_a_typed_error(server: Server, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=60)
    assert response.status_code in (400, 422)
    assert response.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_health_answers_while_a_huge_prompt_is_tokenized(server: Server) -> None:
    body = {"inputs": "word " * 350_000}

    async def run() -> list[float]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            posts = [asyncio.create_task(client.post("/generate", json=body)) for _ in range(3)]
            times = []
            while not all(post.done() for post in posts):
                start = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                times.append(time.monotonic() - start)
            assert {post.result().status_code for post in posts} == {422}
            return times

    assert max(asyncio.run(run())) < 1.0


def test_wrong_content_type(server: Server) -> None:
    response = httpx.post(
        f"{server.url}/generate", content=b"x=1", headers={"content-type": "text/plain"}
    )
    assert response.status_code == 415


def test_chat_answers_a_question_and_stops_by_itself(server: Server) -> None:
    body = {
        "model": "tgi",
        "messages": [{"role": "user", "content": "What is prefill?"}],
        "max_tokens": 100,
        "temperature": 0,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "prompt" in answer["choices"][0]["message"]["content"]
    assert answer["usage"]["total_tokens"] > answer["usage"]["prompt_tokens"] > 0


async def test_a_text_scores_as_it_did_when_it_was_generated(server: Server) -> None:
    """In chunks as a prompt, and token by token: the same numbers, the same candidates."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
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


def processes_of(server: Server) -> list[psutil.Process]:
    launcher = psutil.Process(server.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def test_sigterm_lets_20_streams_finish_and_exits_0() -> None:
    with launch("--max-batch-prefill-tokens=64") as server:
        processes = processes_of(server)

        async def run() -> list[list[dict[str, Any]]]:
            body = {
                "inputs": "What is a shard?",
                "parameters": {"max_new_tokens": 150, "ignore_eos": True},
            }
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                started = asyncio.Semaphore(0)

                async def one() -> list[dict[str, Any]]:
                    events: list[dict[str, Any]] = []
                    async with client.stream("POST", "/generate_stream", json=body) as response:
                        async for event in events_of(response):
                            if not events:
                                started.release()
                            events.append(event)
                    return events

                tasks = [asyncio.create_task(one()) for _ in range(20)]
                for _ in tasks:
                    await started.acquire()
                server.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*tasks)

        for events in asyncio.run(run()):
            assert len(events) == 150
            assert events[-1]["generated_text"] is not None
        assert server.process.wait(60) == 0
        assert psutil.wait_procs(processes[1:], timeout=10)[1] == []
        assert list(server.sockets.iterdir()) == []


def test_killing_the_launcher_leaves_no_orphan() -> None:
    with launch() as server:
        processes = processes_of(server)
        assert len(processes) >= 3
        server.process.kill()
        assert psutil.wait_procs(processes[1:], timeout=30)[1] == []
        wait_for(lambda: not list(server.sockets.glob("shard-*[0-9]")))


def test_two_tensor_parallel_shards_serve_what_one_does(server: Server) -> None:
    body = {"inputs": "What is decode?", "parameters": {"max_new_tokens": 30, "details": True}}
    with launch("--num-shard=2", "--dtype=float32") as sharded, launch("--dtype=float32") as single:
        answers = [
            httpx.post(f"{one.url}/generate", json=body, timeout=60).json()
            for one in (single, sharded)
        ]
    ids = [[token["id"] for token in answer["details"]["tokens"]] for answer in answers]
    assert ids[0] == ids[1]
    assert answers[0]["generated_text"] == answers[1]["generated_text"]
