"""Shards and router of the demo model are killed, stopped and poisoned while clients wait for their tokens."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from bench.faults.streams import Answer, Clients, differences, mixed_bodies
from tokenizers import Tokenizer

from millrace_launcher.demo import demo_folder
from millrace_testing.launcher.e2e import END_SECONDS, Server, launch, until, wait_for
from millrace_testing.shards.doomed_shard import LAST_WORDS

SUPPORT = Path(__file__).parents[1] / "support" / "millrace_testing" / "shards"
SHARD_LAUNCHER = str(SUPPORT / "shard_launcher.py")
DOOMED_SHARD = str(SUPPORT / "doomed_shard.py")
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
POISONED = [*EIGHT]
POISONED[POISON] = {**EIGHT[POISON], "inputs": EIGHT[POISON]["inputs"] + MARK}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with launch("--deterministic=on", "--step-timeout=10") as running:
        yield running


@pytest.fixture
def server_with_int8() -> Iterator[Server]:
    with launch("--deterministic=on", "--step-timeout=10", "--kv-cache-dtype=int8") as running:
        info = httpx.get(f"{running.url}/info", timeout=END_SECONDS).json()
        assert info["kv_cache_dtype"] == "int8"
        yield running


def ask(server: Server, body: dict[str, Any] = QUESTION) -> dict[str, Any]:
    """The whole answer, but for the number of tokens found cached."""
    response = httpx.post(f"{server.url}/generate", json=body, timeout=END_SECONDS)
    assert response.status_code == 200, response.text
    return without_cached(response.json())


def without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    answer["details"].pop("cached_tokens")
    return answer


def is_ready(server: Server) -> bool:
    """Whether `/readyz` answers 200; a server that does not listen is not ready."""
    try:
        return httpx.get(f"{server.url}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def recoveries(server: Server, reason: str) -> float:
    return server.metrics().get(f'millrace_recoveries_total{{reason="{reason}"}}', 0.0)


def stop_body(undisturbed: Answer) -> dict[str, Any]:
    """`STORY` with a stop string that begins after a sixth of its tokens and ends after half of them."""
    texts = [json.loads(event)["token"]["text"] for event in undisturbed.events]
    stop = "".join(texts[len(texts) // 6 : len(texts) // 2])
    return {**STORY, "parameters": {**STORY["parameters"], "stop": [stop]}}


class Undisturbed(NamedTuple):
    """The answers of a server without faults."""

    bodies: list[dict[str, Any]]
    streams: list[Answer]
    whole: dict[str, Any]


class FaultCheck:
    """Sends streams of all kinds, the first of which ends with a stop string, and a request for one whole answer."""

    def __init__(self) -> None:
        self._undisturbed: dict[str, Undisturbed] = {}

    async def run(
        self, server: Server, fault: Callable[[psutil.Process], object], reason: str
    ) -> None:
        """All answers equal those of a server without faults, although `fault` hits a shard while it is stopped."""
        async with (
            Clients(server.url) as clients,
            httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as plain,
        ):
            undisturbed = await self._ask(server, clients, plain)
            bodies = undisturbed.bodies

            async def answers() -> tuple[list[Answer], httpx.Response]:
                return await asyncio.gather(
                    clients.send_all(bodies), plain.post("/generate", json=STORY)
                )

            def send() -> Coroutine[Any, Any, tuple[list[Answer], httpx.Response]]:
                clients.answers = []
                return answers()

            def is_time() -> bool:
                return bool(clients.answers) and len(clients.answers[0].events) >= middle

            middle = len(undisturbed.streams[0].events) // 2
            num_requests, num_replayed = len(bodies) + 1, 0.0
            # An answer in transit during the fault may be the last one of its stream, which then needs no replay.
            while num_replayed < num_requests:
                before, replayed = recoveries(server, reason), num_replays(server)
                task, shard = await server.caught(send, is_time=is_time, num_running=num_requests)
                fault(shard)
                streams, whole = await task
                assert differences(undisturbed.streams, streams) == []
                assert without_cached(whole.json()) == undisturbed.whole
                assert streams[0].end["details"]["finish_reason"] == "stop_sequence"
                # The streams may end before a planned restart, which waits for the model to be loaded.
                await until(lambda: recoveries(server, reason) > before)  # noqa: B023
                assert recoveries(server, reason) == before + 1
                assert not shard.is_running()
                num_replayed = num_replays(server) - replayed

    async def _ask(self, server: Server, clients: Clients, plain: httpx.AsyncClient) -> Undisturbed:
        if server.url not in self._undisturbed:
            (story,) = await clients.send_all([STORY])
            bodies = [stop_body(story), *STREAMS]
            streams = await clients.send_all(bodies)
            whole = without_cached((await plain.post("/generate", json=STORY)).json())
            self._undisturbed[server.url] = Undisturbed(bodies, streams, whole)
        return self._undisturbed[server.url]


def num_replays(server: Server) -> float:
    return server.metrics()["millrace_requests_replayed_total"]


@pytest.fixture(scope="module")
def fault_check() -> FaultCheck:
    return FaultCheck()


async def test_streams_and_whole_answers_go_on_over_a_kill(
    server: Server, fault_check: FaultCheck
) -> None:
    await fault_check.run(server, psutil.Process.kill, "lost")


@pytest.mark.long
async def test_streams_go_on_over_a_kill_with_keys_and_values_in_int8(
    server_with_int8: Server, fault_check: FaultCheck
) -> None:
    await fault_check.run(server_with_int8, psutil.Process.kill, "lost")


@pytest.mark.long
async def test_a_shard_that_is_stopped_is_restarted_and_streams_go_on(
    server: Server, fault_check: FaultCheck
) -> None:
    await fault_check.run(server, lambda stopped: stopped.status(), "hung")


async def test_sighup_restarts_the_shards_under_load_without_failed_requests(
    server: Server, fault_check: FaultCheck
) -> None:
    old = server.shard
    await fault_check.run(
        server, lambda _: server.process.send_signal(signal.SIGHUP), reason="planned"
    )
    assert server.shard.pid != old.pid


def test_a_shard_killed_while_idle_comes_back_by_itself(server: Server) -> None:
    expected, before = ask(server), recoveries(server, "lost")
    launcher = psutil.Process(server.process.pid)
    # So that nothing is started again before it was missed.
    launcher.suspend()
    try:
        server.shard.kill()
        wait_for(lambda: not is_ready(server))
        assert httpx.get(f"{server.url}/health", timeout=END_SECONDS).status_code == 200
    finally:
        launcher.resume()
    wait_for(lambda: is_ready(server))
    assert recoveries(server, "lost") == before + 1
    assert ask(server) == expected


def test_a_killed_router_comes_back_and_shards_keep_their_weights(server: Server) -> None:
    expected, router, kept = ask(server), server.find("router"), server.shard.pid
    assert router is not None
    router.kill()
    wait_for(lambda: (new := server.find("router")) is not None and new.pid != router.pid)
    wait_for(lambda: is_ready(server))
    assert ask(server) == expected
    assert server.shard.pid == kept
    assert server.log.count("Measuring steps") == 1


@pytest.mark.long
async def test_clients_that_connect_while_routers_are_killed_are_all_answered(
    server: Server,
) -> None:
    expected, is_over = await asyncio.to_thread(ask, server), asyncio.Event()

    async def send() -> None:
        response = await client.post("/generate", json=QUESTION)
        assert response.status_code == 200, response.text
        assert without_cached(response.json()) == expected

    async def send_until_over() -> None:
        while not is_over.is_set():
            # A killed router resets its connections.
            with suppress(httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                await send()

    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(4):
            tasks.create_task(send_until_over())
        for _ in range(3):
            router = await until(lambda: server.find("router"))
            assert router is not None
            router.kill()
            await asyncio.to_thread(router.wait, END_SECONDS)
            await asyncio.gather(*(send() for _ in range(8)))
        is_over.set()


class Doomed(NamedTuple):
    """A float32 server whose shard was killed twice before it served."""

    server: Server
    doom: Path
    """The path of a file that makes new shards exit."""


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doomed]:
    folder = tmp_path_factory.mktemp("doom")
    doom, cold = folder / "has-come", folder / "is-cold"
    cold.touch()

    def kill_while_loading_and_warming_up(server: Server) -> None:
        first = wait_for(lambda: server.find("shard-0"))
        assert first is not None
        first.kill()
        wait_for(lambda: "Warming up model" in server.log)
        server.shard.kill()
        cold.unlink()

    tokenizer = Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    poison = tokenizer.encode(POISONED[POISON]["inputs"]).ids[-6:]
    with launch(
        "--deterministic=on",
        "--dtype=float32",
        "--max-restarts=2",
        # Each of its processes looks at its start whether it is to live.
        "--fork-server=off",
        launcher=(SHARD_LAUNCHER, DOOMED_SHARD),
        env={
            "MILLRACE_DOOM": str(doom),
            "MILLRACE_COLD": str(cold),
            "MILLRACE_TEST_POISON": ",".join(map(str, poison)),
            "MILLRACE_TEST_POISON_HOW": "raise",
        },
        meanwhile=kill_while_loading_and_warming_up,
    ) as running:
        yield Doomed(running, doom)


@pytest.mark.long
def test_a_shard_killed_while_it_starts_is_started_again(doomed: Doomed) -> None:
    assert ask(doomed.server)["details"]["generated_tokens"] == 24


@pytest.mark.long
async def test_streams_and_whole_answers_go_on_over_a_kill_in_float32(
    doomed: Doomed, fault_check: FaultCheck
) -> None:
    await fault_check.run(doomed.server, psutil.Process.kill, "lost")


async def test_only_the_poison_request_of_eight_fails(doomed: Doomed) -> None:
    async with Clients(doomed.server.url) as clients:
        undisturbed = await clients.send_all(EIGHT)
        answers = await clients.send_all(POISONED)
        (again,) = await clients.send_all([POISONED[POISON]])
        records = json.loads(await clients.text("/v1/quarantine"))["quarantined"]
    assert differences(undisturbed, answers, but=POISON) == []
    for answer in (answers[POISON], again):
        assert "quarantined" in answer.error
    assert again.status == 424
    (record,) = records
    assert record["generated_tokens"] == 0
    assert MARK.strip() not in json.dumps(record)


async def test_shards_that_keep_dying_end_the_server_with_an_error_for_each_client(
    doomed: Doomed,
) -> None:
    server, doom = doomed
    async with Clients(server.url) as clients:

        def send() -> Coroutine[Any, Any, list[Answer]]:
            clients.answers = []
            return clients.send_all(STREAMS)

        streams, shard = await server.caught(
            send, is_time=lambda: clients.num_tokens > len(STREAMS), num_running=len(STREAMS)
        )
        doom.touch()
        shard.kill()
        answers = await streams
    assert await asyncio.to_thread(server.process.wait, END_SECONDS) == 3
    assert await asyncio.to_thread(server.is_silent.wait, END_SECONDS)
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


@pytest.mark.long
async def test_streams_that_run_out_of_memory_together_go_on_in_their_kv() -> None:
    """Steps of more than four rows run out of memory, so that half of the rows wait with their KV."""
    with launch(
        "--deterministic=on",
        launcher=(SHARD_LAUNCHER, str(SUPPORT / "poison_shard.py")),
        env={"MILLRACE_TEST_OOM_ROWS": "4"},
    ) as server:
        async with Clients(server.url) as clients:
            alone = [(await clients.send_all([body]))[0] for body in EIGHT]
            together = await clients.send_all(EIGHT)
        assert differences(alone, together) == []
        assert recoveries(server, "out_of_memory") > 0
        metrics = server.metrics()
        assert metrics["millrace_requests_replayed_total"] > 0
        assert metrics["millrace_tokens_recomputed_total"] == 0
