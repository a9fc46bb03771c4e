"""HAProxy and Envoy before two servers: bytes, and the choice of the server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from tests.ecosystem.operating.proxies import (
    BALANCERS,
    Front,
    Proxy,
    fronting,
    prefixed,
    wait_for_port,
)
from tests.router.api.test_openapi import BODIES, STREAM, STREAMS

from millrace_router.api.openapi.document import OPERATIONS
from millrace_testing.launcher.deployment import kept_port
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
    "x-millrace-stream",
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


class Load:
    """Clients that ask one after another, each time over a new connection, until they are stopped.

    A client that keeps connections finds some closed by a proxy, as HTTP allows at any time.
    """

    def __init__(self, front: Front) -> None:
        self._front = front
        self._stopped = False
        self.num_answers = 0
        self.failures: list[object] = []
        self._clients = [asyncio.create_task(self._ask(number)) for number in range(8)]

    async def _ask(self, client: int) -> None:
        path = ("/generate", "/generate_stream")[client % 2]
        while not self._stopped:
            body = prefixed(client, self.num_answers)
            try:
                async with self._front.client.post(
                    self._front.url + path, json=body, headers={"connection": "close"}
                ) as answer:
                    found = await answer.read()
            except aiohttp.ClientError as error:
                self.failures.append(repr(error))
                continue
            if answer.status != 200 or b"generated_text" not in found:
                self.failures.append((answer.status, found))
            self.num_answers += 1

    async def more(self, number: int) -> None:
        """Wait for so many answers from now on."""
        wanted = self.num_answers + number
        while self.num_answers < wanted and not self.failures:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Let the clients finish."""
        self._stopped = True
        await asyncio.gather(*self._clients)


@pytest.mark.parametrize("proxy", BALANCERS, ids=str)
async def test_a_server_that_leaves_under_load_loses_nothing(proxy: Proxy, tmp_path: Path) -> None:
    async with fronting(proxy, tmp_path, num_edges=2, script=echo) as front:
        load = Load(front)
        await load.more(50)
        leaving, staying = front.edges
        leaving.services.infer.leave()
        seen = -1
        # The proxy has learnt of it once no request comes any more.
        while seen != len(leaving.batcher.requests):
            seen = len(leaving.batcher.requests)
            await load.more(100)
        leaving.services.infer.drain()
        before = len(staying.batcher.requests)
        await load.more(100)
        await load.stop()
        assert load.failures == []
        assert len(leaving.batcher.requests) == seen
        assert len(staying.batcher.requests) >= before + 100


@pytest.mark.parametrize("proxy", BALANCERS, ids=str)
async def test_a_stream_on_a_server_that_recovers_goes_on(proxy: Proxy, tmp_path: Path) -> None:
    async with fronting(proxy, tmp_path, num_edges=2) as front:
        asking = asyncio.create_task(
            front.client.post(f"{front.url}/generate_stream", json=prefixed(1, 1))
        )
        while not any(queue.qsize() for queue in front.streams):
            await asyncio.sleep(0.005)
        (place,) = (one for one in range(2) if front.streams[one].qsize())
        stream = front.streams[place].get_nowait()
        stream.token(token_event(1, "x"))
        answer = await asking
        await answer.content.readuntil(b"\n\n")
        front.edges[place].batcher.status.begin_outage("lost")
        # New requests go to the other server, whatever they hash to.
        streak = 0
        while streak < 12:
            client = asyncio.create_task(
                front.client.post(f"{front.url}/generate_stream", json=prefixed(streak, 2))
            )
            while not any(queue.qsize() for queue in front.streams):
                await asyncio.sleep(0.005)
            for one in range(2):
                while front.streams[one].qsize():
                    kept = front.streams[one].get_nowait()
                    kept.token(token_event(1, "x", finished=finished("x", 1)))
                    streak = streak + 1 if one != place else 0
            await (await client).read()
        front.edges[place].batcher.status.end_outage()
        stream.token(token_event(2, "y", finished=finished("xy", 2)))
        assert b'"generated_text":"xy"' in await answer.read()


async def test_a_reload_of_haproxy_under_load_loses_nothing(tmp_path: Path) -> None:
    (proxy,) = (one for one in BALANCERS if one.name == "haproxy")
    async with fronting(proxy, tmp_path, num_edges=2, script=echo) as front:
        # A second one, as a service runs it: a master that hands its listeners over.
        text = (tmp_path / "haproxy.cfg").read_text()
        port = front.port + 1
        text = text.replace(f"bind :{front.port}", f"bind :{port}").replace(
            "global\n", f"global\n    stats socket {tmp_path}/admin expose-fd listeners\n"
        )
        (tmp_path / "reloaded.cfg").write_text(text)
        command = [proxy.program(), "-W", "-db", "-f", str(tmp_path / "reloaded.cfg")]
        process = subprocess.Popen(command)
        try:
            await wait_for_port(port, process)
            load = Load(replace(front, port=port))
            for _ in range(3):
                await load.more(100)
                process.send_signal(signal.SIGUSR2)
            await load.more(300)
            await load.stop()
            assert load.failures == []
        finally:
            process.terminate()
            process.wait(20)


# A connection that Envoy opens while the servers end may be left to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_hot_restart_of_envoy_under_load_loses_nothing(tmp_path: Path) -> None:
    (proxy,) = (one for one in BALANCERS if one.name == "envoy")
    async with fronting(proxy, tmp_path, num_edges=2, script=echo) as front:
        text, port = (tmp_path / "envoy.yaml").read_text(), front.port + 1
        text = text.replace(f"port_value: {front.port}", f"port_value: {port}")
        (tmp_path / "restarted.yaml").write_text(text)
        command = [proxy.program(), "-c", str(tmp_path / "restarted.yaml"), "--base-id", str(port)]
        command += ["--concurrency", "1", "--log-level", "error", "--drain-strategy", "immediate"]
        command += ["--drain-time-s", "1", "--parent-shutdown-time-s", "3"]
        processes = [subprocess.Popen([*command, "--restart-epoch", "0"])]
        try:
            await wait_for_port(port, processes[0])
            load = Load(replace(front, port=port))
            for epoch in (1, 2):
                await load.more(100)
                processes.append(subprocess.Popen([*command, "--restart-epoch", str(epoch)]))
                # The one before ends when its connections had their time.
                while processes[epoch - 1].poll() is None and not load.failures:
                    await load.more(20)
            await load.more(100)
            await load.stop()
            assert load.failures == []
            assert [process.poll() for process in processes] == [0, 0, None]
        finally:
            for process in processes:
                process.terminate()
                process.wait(20)


async def test_no_request_fails_when_haproxy_has_not_seen_yet_that_a_server_is_dead(
    tmp_path: Path,
) -> None:
    (proxy,) = (one for one in BALANCERS if one.name == "haproxy")
    async with fronting(proxy, tmp_path, num_edges=2, script=echo) as front:
        with kept_port() as dead:
            text, port = (tmp_path / "haproxy.cfg").read_text(), front.port + 1
            changes = {
                f"bind :{front.port}": f"bind :{port}",
                f"server b {front.edges[1].url.removeprefix('http://')}": f"server b 127.0.0.1:{dead}",
                "inter 50ms": "inter 1h",
            }
            for old, new in changes.items():
                assert old in text
                text = text.replace(old, new)
            (tmp_path / "dead.cfg").write_text(text)
            process = subprocess.Popen([proxy.program(), "-db", "-f", str(tmp_path / "dead.cfg")])
            try:
                await wait_for_port(port, process)
                url = front.url.replace(str(front.port), str(port))
                for number in range(12):
                    body = prefixed(number, 1)
                    async with front.client.post(f"{url}/generate", json=body) as answer:
                        assert answer.status == 200
            finally:
                process.terminate()
                process.wait(20)
