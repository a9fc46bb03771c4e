"""Shards and router of the demo model are killed, stopped and poisoned while clients wait for their tokens."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from bench.survival.streams import Answer, Clients, differences, mixed_bodies
from tokenizers import Tokenizer

from millrace_doomed_shard import LAST_WORDS
from millrace_e2e import Server, launch
from millrace_launcher.demo import demo_folder

SUPPORT = Path(__file__).parents[1] / "support"
SHARD_LAUNCHER = str(SUPPORT / "millrace_shard_launcher.py")
DOOMED_SHARD = str(SUPPORT / "millrace_doomed_shard.py")
POLL_SECONDS = 0.02
STREAMS = mixed_bodies(8, longest=150)
QUESTION = {
    "inputs": "What is a shard?",
    "parameters": {"max_new_tokens": 24, "ignore_eos": True, "details": True},
}
STORY: dict[str, Any] = {
    "inputs": "What is a block?",
    "parameters": {
        "max_new_tokens": 160,
        "ignore_eos": True,
        "details": True,
        "do_sample": True,
        "seed": 7,
    },
}
EIGHT = mixed_bodies(8, longest=60)
POISON, MARK = 3, " 90909 wqxz wqxz"
EIGHT[POISON] = {**EIGHT[POISON], "inputs": EIGHT[POISON]["inputs"] + MARK}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with launch("--deterministic=on", "--step-timeout=3") as running:
        yield running


@pytest.fixture(scope="module")
def float32_server() -> Iterator[Server]:
    with launch("--deterministic=on", "--dtype=float32") as running:
        yield running


def wait_for(condition: Callable[[], Any], *, seconds: float = 150) -> Any:
    """Poll until `condition()` holds; what it says then."""

    async def poll() -> Any:
        return await until(condition, seconds=seconds)

    return asyncio.run(poll())


async def until(condition: Callable[[], Any], *, seconds: float = 150) -> Any:
    """Poll until `condition()` holds; what it says then."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(POLL_SECONDS)
    return found


def ask(server: Server, body: dict[str, Any] = QUESTION) -> dict[str, Any]:
    """The whole answer, but for the number of tokens found cached."""
    response = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return without_cached(response.json())


def without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    answer["details"].pop("cached_tokens")
    return answer


def is_ready(server: Server) -> bool:
    """Whether `/readyz` says so; nobody listening is not ready either."""
    try:
        return httpx.get(f"{server.url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def recoveries(server: Server) -> float:
    return server.metrics().get("millrace_recovery_duration_count", 0.0)


def stop_body(undisturbed: Answer) -> dict[str, Any]:
    """`STORY` with a stop string that begins after a sixth of its tokens and ends after half of them."""
    texts = [json.loads(event)["token"]["text"] for event in undisturbed.events]
    stop = "".join(texts[len(texts) // 6 : len(texts) // 2])
    return {**STORY, "parameters": {**STORY["parameters"], "stop": [stop]}}


async def survive(server: Server, blow: Callable[[], object]) -> None:
    """Streams of all kinds and an answer in one piece go on over `blow` as if nothing had happened."""
    async with Clients(server.url) as clients:
        (story,) = await clients.send_all([STORY])
        bodies = [stop_body(story), *STREAMS]
        undisturbed = await clients.send_all(bodies)
        async with httpx.AsyncClient(base_url=server.url, timeout=150) as plain:
            expected = (await plain.post("/generate", json=STORY)).json()
            before = recoveries(server)
            streams = asyncio.create_task(clients.send_all(bodies))
            whole = asyncio.create_task(plain.post("/generate", json=STORY))
            middle = len(undisturbed[0].events) // 2
            await until(
                lambda: (
                    clients.answers is not undisturbed and len(clients.answers[0].events) >= middle
                )
            )
            blow()
            num_before = len(clients.answers[0].events)
            assert not whole.done()
            answers = await streams
            answer = await whole
    assert differences(undisturbed, answers) == []
    assert without_cached(answer.json()) == without_cached(expected)
    assert recoveries(server) == before + 1
    stopped = answers[0]
    assert stopped.end["details"]["finish_reason"] == "stop_sequence"
    assert middle <= num_before < len(stopped.events), "the cut is within the stop string"


@pytest.mark.parametrize("fixture", ["server", "float32_server"])
async def test_streams_and_whole_answers_go_on_over_a_kill(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(fixture)
    await survive(server, server.shard.kill)


async def test_a_shard_that_is_stopped_is_restarted_and_streams_go_on(server: Server) -> None:
    stopped = server.shard
    await survive(server, lambda: stopped.send_signal(signal.SIGSTOP))
    assert not stopped.is_running()


async def test_sighup_restarts_the_shards_under_load_and_fails_nobody(server: Server) -> None:
    old = server.shard
    await survive(server, lambda: server.process.send_signal(signal.SIGHUP))
    assert not old.is_running()
    assert server.shard.pid != old.pid


def test_a_shard_killed_while_idle_comes_back_by_itself(server: Server) -> None:
    expected, before = ask(server), recoveries(server)
    old = server.shard
    old.kill()
    wait_for(lambda: not is_ready(server))
    assert httpx.get(f"{server.url}/health").status_code == 200
    wait_for(lambda: is_ready(server))
    assert recoveries(server) == before + 1
    assert ask(server) == expected


def test_a_killed_router_comes_back_and_shards_keep_their_weights(server: Server) -> None:
    expected, router, kept = ask(server), server.find("router"), server.shard.pid
    assert router is not None
    router.kill()
    wait_for(lambda: (new := server.find("router")) is not None and new.pid != router.pid)
    wait_for(lambda: is_ready(server))
    assert ask(server) == expected
    assert server.shard.pid == kept


def kill_while_loading_and_warming_up(server: Server) -> None:
    first = wait_for(lambda: server.find("shard-0"))
    first.kill()
    wait_for(lambda: "Warming up model" in server.log)
    server.shard.kill()


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server whose shard was killed twice before it served, and the file that keeps further shards from living."""
    doom = tmp_path_factory.mktemp("doom") / "has-come"
    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    poison = tokenizer.encode(EIGHT[POISON]["inputs"]).ids[-6:]
    with launch(
        "--deterministic=on",
        "--max-restarts=2",
        launcher=(SHARD_LAUNCHER, DOOMED_SHARD),
        env={
            "MILLRACE_DOOM": str(doom),
            "MILLRACE_TEST_POISON": ",".join(map(str, poison)),
            "MILLRACE_TEST_POISON_HOW": "raise",
        },
        meanwhile=kill_while_loading_and_warming_up,
    ) as running:
        yield running, doom


def test_a_shard_killed_while_it_starts_is_started_again(doomed: tuple[Server, Path]) -> None:
    server, _ = doomed
    assert ask(server)["details"]["generated_tokens"] == 24


async def test_of_eight_requests_the_one_that_breaks_steps_fails_alone(
    server: Server, doomed: tuple[Server, Path]
) -> None:
    poisoned, _ = doomed
    async with Clients(server.url) as clients:
        undisturbed = await clients.send_all(EIGHT)
    async with Clients(poisoned.url) as clients:
        answers = await clients.send_all(EIGHT)
        (again,) = await clients.send_all([EIGHT[POISON]])
        records = json.loads(await clients.text("/v1/quarantine"))["quarantined"]
    assert differences(undisturbed, answers, but=POISON) == []
    for answer in (answers[POISON], again):
        assert "quarantined" in answer.error
    assert again.status == 424
    (record,) = records
    assert record["generated_tokens"] == 0
    assert MARK.strip() not in json.dumps(record)


async def test_shards_that_die_again_and_again_end_everything_with_a_word_to_each_client(
    doomed: tuple[Server, Path],
) -> None:
    server, doom = doomed
    async with Clients(server.url) as clients:
        streams = asyncio.create_task(clients.send_all(STREAMS))
        await until(lambda: clients.num_tokens > len(STREAMS))
        doom.touch()
        server.shard.kill()
        answers = await streams
    assert await asyncio.to_thread(server.process.wait, 60) == 3
    assert LAST_WORDS in server.log
    for answer in answers:
        assert answer.is_whole or "unavailable" in answer.error, answer.error
    assert any(answer.error for answer in answers)
    assert process_count(server) == 0


def process_count(server: Server) -> int:
    return sum(
        str(server.sockets) in " ".join(p.info["cmdline"] or ())
        for p in psutil.process_iter(["cmdline"])
    )
