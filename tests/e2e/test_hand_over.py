"""Routers of the demo model are replaced while clients read: no request fails, and every answer has the same bytes."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from bench.faults.members import GONE
from bench.faults.streams import Answer, Clients, differences, mixed_bodies

from millrace_testing.launcher.deployment import certificate
from millrace_testing.launcher.e2e import END_SECONDS, Server, launch, until
from millrace_testing.router.keyed import Client, choices_of, clients, ids_of, read_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")

STREAMS = mixed_bodies(24, longest=800)
ROUTERS = Path(__file__).parents[1] / "support" / "millrace_testing" / "router"
TORN_LAUNCHER = (str(ROUTERS / "router_launcher.py"), str(ROUTERS / "torn_router.py"))
SHORT = {"inputs": "A block", "parameters": {"max_new_tokens": 2}}


class Torn(NamedTuple):
    """A server, and the file that names the place where a router of it dies."""

    server: Server
    place: Path


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torn]:
    place = tmp_path_factory.mktemp("torn") / "place"
    env = {"MILLRACE_TEST_TORN": str(place)}
    flags = ("--deterministic=on", "--max-restarts=100")
    with launch(*flags, launcher=TORN_LAUNCHER, env=env) as running:
        yield Torn(running, place)


@pytest.fixture(scope="module")
def server(torn: Torn) -> Server:
    return torn.server


@pytest.fixture(scope="module")
def undisturbed() -> list[Answer]:
    """The answers to `STREAMS` without faults, once they are known."""
    return []


def routers(server: Server) -> list[psutil.Process]:
    """All routers that live, the oldest first."""
    processes = []
    for child in psutil.Process(server.process.pid).children():
        with suppress(*GONE):
            if {TORN_LAUNCHER[1], "millrace_router"} & set(child.cmdline()):
                processes.append(child)
    return sorted(processes, key=lambda child: child.create_time())


def count(server: Server, words: str) -> int:
    """Lines of the log that have `words`."""
    return sum(words in line for line in server.lines)


TAKES_OVER, SERVES, FAILS = "takes over", "The router is back", "No hand-over"


async def replace(server: Server, *words: str) -> None:
    """Request another router, and wait until one of `words` is logged once more."""
    before = sum(count(server, each) for each in words)
    server.process.send_signal(signal.SIGUSR2)
    await until(lambda: sum(count(server, each) for each in words) > before)


class Visitors:
    """Clients without streams: one that keeps its connection, and new ones."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.statuses: list[int] = []

    @asynccontextmanager
    async def coming(self) -> AsyncIterator[None]:
        """Let them come one after the other for the length of the block; a request that is refused raises."""
        is_over = asyncio.Event()
        coming = asyncio.create_task(self._come(is_over))
        try:
            yield
        finally:
            is_over.set()
            await coming

    async def _come(self, is_over: asyncio.Event) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=END_SECONDS) as kept:
            while not is_over.is_set():
                answer = await kept.post("/generate", json=SHORT)
                async with httpx.AsyncClient(base_url=self._url, timeout=END_SECONDS) as new:
                    self.statuses += [answer.status_code, (await new.get("/health")).status_code]


async def over(
    server: Server, undisturbed: list[Answer], *words: tuple[str, ...], has_visitors: bool = True
) -> list[psutil.Process]:
    """Replace routers in the middle of streams, each until one of `words`; return those that lived at their end."""
    async with Clients(server.url) as http:
        if not undisturbed:
            undisturbed += await http.send_all(STREAMS)
    visitors = Visitors(server.url)
    coming = visitors.coming() if has_visitors else nullcontext()
    async with Clients(server.url) as http, coming:
        reading = asyncio.create_task(http.send_all(STREAMS))
        await until(lambda: http.num_tokens > 2 * len(STREAMS))
        for each in words:
            await replace(server, *each)
        assert not reading.done()
        alive = routers(server)
        disturbed = await reading
    assert not differences(undisturbed, disturbed)
    assert set(visitors.statuses) == ({200} if has_visitors else set())
    await until(lambda: len(routers(server)) == 1)
    return alive


async def test_streams_go_on_byte_for_byte_over_two_hand_overs(
    server: Server, undisturbed: list[Answer]
) -> None:
    (first,) = routers(server)
    alive = await over(server, undisturbed, (SERVES,), (SERVES,))
    assert alive[0] == first
    assert len(alive) == 3
    assert routers(server) == alive[-1:]


@pytest.mark.parametrize("are_keyed", [False, True])
async def test_every_route_goes_on_over_a_hand_over(server: Server, *, are_keyed: bool) -> None:
    await read_all(server.url, "warm", are_keyed=are_keyed)
    whole = await read_all(server.url, "whole", are_keyed=are_keyed)
    readers = clients(are_keyed=are_keyed)
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
        reading = [asyncio.create_task(one.read(http, "over")) for one in readers]
        streams = [one for one in readers if one.path != "/generate"]
        await asyncio.gather(*(one.has_read.wait() for one in streams))
        with server.held():
            await replace(server, TAKES_OVER)
        await asyncio.gather(*reading)
    for one, other in zip(readers, whole, strict=True):
        assert one.status == 200, one.text
        assert ids_of(one.text) == ids_of(other.text), one.path
        assert choices_of(one.text) == choices_of(other.text), one.path
    await until(lambda: len(routers(server)) == 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "place",
    [
        "opened",
        "refuse",
        *(pytest.param(p, marks=pytest.mark.long) for p in ("warm-up", "log", "listening")),
    ],
)
async def test_a_new_router_that_fails_leaves_the_old_one_serving(
    torn: Torn, undisturbed: list[Answer], place: str
) -> None:
    (old,) = routers(torn.server)
    torn.place.write_text(place)
    alive = await over(torn.server, undisturbed, (FAILS,))
    assert not torn.place.exists()
    assert alive == routers(torn.server) == [old]


@pytest.mark.long
async def test_a_router_that_dies_after_it_took_over_costs_the_former_one_nothing(
    torn: Torn, undisturbed: list[Answer]
) -> None:
    (old,) = routers(torn.server)
    torn.place.write_text("token")
    # The next one is back once it serves, and the one after it, too. Visitors of the one that dies would be cut off.
    alive = await over(torn.server, undisturbed, (SERVES,), (SERVES,), has_visitors=False)
    assert not torn.place.exists()
    assert alive[0] == old


@pytest.mark.long
@pytest.mark.parametrize("place", ["release", "released", "relay"])
async def test_an_old_router_that_dies_leaves_the_new_one_serving(torn: Torn, place: str) -> None:
    server = torn.server
    whole = await read_all(server.url, f"whole-{place}")
    (old,) = routers(server)
    readers = clients()
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
        reading = [asyncio.create_task(one.read(http, place)) for one in readers]
        streams = [one for one in readers if one.path != "/generate"]
        await asyncio.gather(*(one.has_read.wait() for one in streams))
        torn.place.write_text(place)
        with server.held():
            await replace(server, TAKES_OVER)
        await asyncio.gather(*reading)
    await until(lambda: old not in routers(server))
    assert not torn.place.exists()
    (new,) = routers(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=END_SECONDS) as http:
        assert (await http.post("/generate", json=SHORT)).status_code == 200
        await asyncio.gather(*(rest_of(one, http, place) for one in readers))
    for one, other in zip(readers, whole, strict=True):
        assert ids_of(one.text) == ids_of(other.text), one.path
        assert choices_of(one.text) == choices_of(other.text), one.path
    assert routers(server) == [new]


async def rest_of(client: Client, http: httpx.AsyncClient, key: str) -> None:
    """Let a client whose answer was cut come back."""
    await client.read_rest(http, key)
    assert client.status == 200, client.text


@pytest.mark.long
async def test_a_shard_that_is_killed_in_a_hand_over_costs_nothing(
    server: Server, undisturbed: list[Answer]
) -> None:
    before = count(server, TAKES_OVER)

    async def kill() -> None:
        await until(lambda: count(server, TAKES_OVER) > before)
        server.shard.kill()

    killing = asyncio.create_task(kill())
    await over(server, undisturbed, (SERVES,))
    await killing


@pytest.mark.long
async def test_streams_over_tls_go_on_and_their_connections_close(tmp_path: Path) -> None:
    files = certificate(tmp_path, "server", "localhost", "127.0.0.1")
    flags = (f"--ssl-certfile={files.cert}", f"--ssl-keyfile={files.key}")
    context = ssl.create_default_context(cafile=str(files.ca))
    body = {"inputs": "A", "parameters": {"max_new_tokens": 600, "ignore_eos": True}}
    with launch("--deterministic=on", *flags) as server:
        url = server.url.replace("http", "https")
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=END_SECONDS) as http:
            whole = (await http.post("/generate", json=body)).json()
            async with http.stream("POST", "/generate_stream", json=body) as answer:
                lines = answer.aiter_lines()
                texts = [await anext(lines)]
                await replace(server, SERVES)
                texts += [line async for line in lines]
            events = [json.loads(text[len("data:") :]) for text in texts if text]
            assert events[-1]["generated_text"] == whole["generated_text"]
            assert len(events) == 600
        # On a new connection: the former one is closed after its stream, perhaps while a request is on its way.
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=END_SECONDS) as http:
            assert (await http.post("/generate", json=SHORT)).status_code == 200
        await until(lambda: count(server, "this one ends with its last connection") == 1)
        await until(lambda: len(routers(server)) == 1)
