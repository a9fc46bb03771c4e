"""nginx and HAProxy with the files in deploy/, before the router's HTTP edge."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from bench.harness.server import free_port
from tests.ecosystem import prepare

from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.launcher.certificates import certificate
from millrace_testing.router.edge import finished, serving, token_event

pytestmark = pytest.mark.ecosystem

DEPLOY = Path(__file__).parents[3] / "deploy"
MAIN = """
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/millrace.conf;
}}
"""
DEADLINE_SECONDS = 20.0
ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 3}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A program, and how it runs with our file."""

    name: str
    write: Callable[[Path, int, str], list[str]]
    """Writes our file to a folder, with another port, server and certificate; returns the arguments that name it."""
    check: tuple[str, ...]
    """Arguments to check the file alone."""

    def __str__(self) -> str:
        return self.name

    def program(self) -> str:
        """The program's path; skips the test where there is none."""
        found = shutil.which(self.name, path=prepare.SEARCHED)
        if found is None:
            pytest.skip(
                f"{self.name} is not installed: make test-ecosystem installs it where it may"
            )
        return found


def adapted(text: str, port: int, server: str, changes: dict[str, str]) -> str:
    """Our file for this machine: the port, the servers, and the files of the certificate."""
    places = {r"\b443\b": str(port), r"127\.0\.0\.1:300\d": server} | changes
    for theirs, ours in places.items():
        text, times = re.subn(theirs, ours, text)
        assert times
    return text


def write_nginx(folder: Path, port: int, server: str) -> list[str]:
    files = certificate(folder, "proxy")
    changes = {
        "/etc/nginx/llm.example.com.pem": str(files.cert),
        "/etc/nginx/llm.example.com.key": str(files.key),
    }
    text = adapted((DEPLOY / "nginx" / "millrace.conf").read_text(), port, server, changes)
    (folder / "millrace.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    # In one process, as the user who runs the test.
    one = "daemon off; master_process off;"
    return ["-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr", "-g", one]


def write_haproxy(folder: Path, port: int, server: str) -> list[str]:
    files = certificate(folder, "proxy")
    both = folder / "both.pem"
    both.write_bytes(files.cert.read_bytes() + files.key.read_bytes())
    changes = {"/etc/haproxy/llm.example.com.pem": str(both)}
    text = adapted((DEPLOY / "haproxy" / "haproxy.cfg").read_text(), port, server, changes)
    (folder / "haproxy.cfg").write_text(text)
    return ["-db", "-f", str(folder / "haproxy.cfg")]


PROXIES = [
    Proxy(name="nginx", write=write_nginx, check=("-t",)),
    Proxy(name="haproxy", write=write_haproxy, check=("-c",)),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A running proxy, a client of it, and the streams of requests that came through."""

    port: int
    trusting: ssl.SSLContext
    client: aiohttp.ClientSession
    streams: asyncio.Queue[TokenStream]

    @property
    def url(self) -> str:
        """The base of routes."""
        return f"https://localhost:{self.port}"


async def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
    pytest.fail("the proxy ended")


@asynccontextmanager
async def fronting(proxy: Proxy, folder: Path) -> AsyncIterator[Front]:
    """The proxy before an edge whose tokens the test sends."""
    streams = asyncio.Queue[TokenStream]()

    def keep(_: ValidRequest, stream: TokenStream) -> None:
        stream.batched_at = stream.queued_at
        streams.put_nowait(stream)

    port = free_port()
    async with serving(keep) as edge:
        arguments = proxy.write(folder, port, edge.url.removeprefix("http://"))
        process = subprocess.Popen([proxy.program(), *arguments])
        trusting = ssl.create_default_context(cafile=str(folder / "proxy-ca.pem"))
        connector = aiohttp.TCPConnector(ssl=trusting)
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                await wait_for_port(port, process)
                async with aiohttp.ClientSession(connector=connector) as client:
                    yield Front(port=port, trusting=trusting, client=client, streams=streams)
        finally:
            process.terminate()
            process.wait(timeout=DEADLINE_SECONDS)


@pytest.mark.parametrize("proxy", PROXIES, ids=str)
def test_the_program_accepts_its_file(proxy: Proxy, tmp_path: Path) -> None:
    arguments = proxy.write(tmp_path, 8443, "127.0.0.1:3000")
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
        stream = await front.streams.get()
        for index, word in enumerate(("x", "y", "z"), start=1):
            end = finished("xyz", 3) if word == "z" else None
            stream.token(token_event(index, word, finished=end))
            # The next token is not sent before this one has come through.
            answer = await asking
            event = await answer.content.readuntil(b"\n\n")
            assert f'"text":"{word}"'.encode() in event
            assert answer.status == 200


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
        stream = await front.streams.get()
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
        async with front.client.get(f"{front.url}/livez") as answer:
            assert answer.status == 200
