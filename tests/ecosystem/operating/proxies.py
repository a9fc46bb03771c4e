"""nginx, HAProxy and Envoy, each with its file in deploy/, before edges of the router."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from bench.harness.server import free_port
from tests.ecosystem import prepare

from millrace_router.engine.infer import SHORTEST
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.launcher.deployment import certificate
from millrace_testing.router.edge import LIMITS, Edge, serving

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
ENVOY = prepare.VENVS / "envoy" / "bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A program, and how it runs with our file."""

    name: str
    write: Callable[[Path, int, Sequence[str]], list[str]]
    """Writes our file to a folder, for a port, two servers and a certificate; returns the arguments that name it."""
    check: tuple[str, ...]
    """Arguments to check the file alone."""

    def __str__(self) -> str:
        return self.name

    def program(self) -> str:
        """The program's path; skips the test where there is none."""
        found = shutil.which(self.name, path=f"{prepare.SEARCHED}:{ENVOY}")
        if found is None:
            pytest.skip(
                f"{self.name} is not installed: make test-all SUITE=ecosystem installs it where it may"
            )
        return found


def adapted(text: str, changes: dict[str, str]) -> str:
    """Our file for this machine: each pattern is there, and replaced."""
    for theirs, ours in changes.items():
        text, times = re.subn(theirs, ours, text)
        assert times, theirs
    return text


def write_nginx(folder: Path, port: int, servers: Sequence[str]) -> list[str]:
    files = certificate(folder, "proxy")
    changes = {
        r"\b443\b": str(port),
        r"127\.0\.0\.1:3000": servers[0],
        "/etc/nginx/llm.example.com.pem": str(files.cert),
        "/etc/nginx/llm.example.com.key": str(files.key),
    }
    text = adapted((DEPLOY / "nginx" / "millrace.conf").read_text(), changes)
    (folder / "millrace.conf").write_text(text)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    # In one process, as the user who runs the test.
    one = "daemon off; master_process off;"
    return ["-c", str(folder / "nginx.conf"), "-p", str(folder), "-e", "stderr", "-g", one]


def write_haproxy(folder: Path, port: int, servers: Sequence[str]) -> list[str]:
    files = certificate(folder, "proxy")
    both = folder / "both.pem"
    both.write_bytes(files.cert.read_bytes() + files.key.read_bytes())
    changes = {
        r"\b443\b": str(port),
        r"127\.0\.0\.1:3000": servers[0],
        r"127\.0\.0\.1:3001": servers[1],
        "/etc/haproxy/llm.example.com.pem": str(both),
        "inter 2s": "inter 50ms",
    }
    text = adapted((DEPLOY / "haproxy" / "haproxy.cfg").read_text(), changes)
    (folder / "haproxy.cfg").write_text(text)
    return ["-db", "-f", str(folder / "haproxy.cfg")]


def write_envoy(folder: Path, port: int, servers: Sequence[str]) -> list[str]:
    files = certificate(folder, "proxy")
    ports = [server.rpartition(":")[2] for server in servers]
    changes = {
        r"port_value: 443\b": f"port_value: {port}",
        r"port_value: 3000\b": f"port_value: {ports[0]}",
        r"port_value: 3001\b": f"port_value: {ports[1]}",
        "/etc/envoy/llm.example.com.pem": str(files.cert),
        "/etc/envoy/llm.example.com.key": str(files.key),
        "interval: 2s": "interval: 0.05s",
    }
    text = adapted((DEPLOY / "envoy" / "envoy.yaml").read_text(), changes)
    (folder / "envoy.yaml").write_text(text)
    one = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
    return ["-c", str(folder / "envoy.yaml"), *one]


PROXIES = [
    Proxy(name="nginx", write=write_nginx, check=("-t",)),
    Proxy(name="haproxy", write=write_haproxy, check=("-c",)),
    Proxy(name="envoy", write=write_envoy, check=("--mode", "validate")),
]
BALANCERS = PROXIES[1:]
"""Those whose files hash the beginning of a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """A running proxy, a client of it, the edges behind it, and the streams of requests that came through to each."""

    port: int
    trusting: ssl.SSLContext
    client: aiohttp.ClientSession
    edges: Sequence[Edge]
    streams: Sequence[asyncio.Queue[TokenStream]]

    @property
    def url(self) -> str:
        """The base of routes."""
        return f"https://localhost:{self.port}"


def prefixed(number: int, rest: int) -> dict[str, Any]:
    """A request whose first 2048 bytes depend on `number` alone."""
    return {
        "inputs": f"{number} " * 1200 + f"{rest}",
        "parameters": {"max_new_tokens": 1, "truncate": 2},
    }


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
async def fronting(
    proxy: Proxy,
    folder: Path,
    *,
    num_edges: int = 1,
    script: Callable[[ValidRequest, TokenStream], None] | None = None,
    seconds: float = DEADLINE_SECONDS,
) -> AsyncIterator[Front]:
    """The proxy before edges whose tokens the test sends, unless `script` does."""
    port, program = free_port(), proxy.program()
    streams = [asyncio.Queue[TokenStream]() for _ in range(num_edges)]

    def keeping(kept: asyncio.Queue[TokenStream]) -> Callable[[ValidRequest, TokenStream], None]:
        def keep(request: ValidRequest, stream: TokenStream) -> None:
            if request.input_ids == SHORTEST.input_ids:
                # A probe of the server's health.
                return
            stream.batched_at = stream.queued_at
            kept.put_nowait(stream)

        return keep

    async with AsyncExitStack() as stack:
        limits = replace(LIMITS, max_concurrent_requests=256)
        edges = [
            await stack.enter_async_context(serving(script or keeping(kept), limits=limits))
            for kept in streams
        ]
        places = [edge.url.removeprefix("http://") for edge in edges]
        arguments = proxy.write(folder, port, (places * 2)[:2])
        process = subprocess.Popen([program, *arguments])
        trusting = ssl.create_default_context(cafile=str(folder / "proxy-ca.pem"))
        connector = aiohttp.TCPConnector(ssl=trusting, limit=0)
        try:
            async with asyncio.timeout(seconds):
                await wait_for_port(port, process)
                async with aiohttp.ClientSession(connector=connector) as client:
                    yield Front(
                        port=port, trusting=trusting, client=client, edges=edges, streams=streams
                    )
        finally:
            process.terminate()
            process.wait(timeout=DEADLINE_SECONDS)
