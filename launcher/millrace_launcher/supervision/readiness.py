"""Waits until children are ready: shards by gRPC health, the router by GET /health."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millrace_launcher.logs import log

POLL_SECONDS = 0.05
ASK_SECONDS = 5.0
SAY_SECONDS = 10.0
# The socket appears after loading; gRPC's own pauses between attempts grow to minutes.
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


async def shard_ready(socket_path: Path) -> None:
    """Return once the shard on this socket reports that it serves."""
    async with grpc.aio.insecure_channel(f"unix:{socket_path}", options=CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def ask() -> bool:
            # A channel that has found nothing waits before it connects again.
            if not socket_path.exists():  # noqa: ASYNC240
                return False
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ASK_SECONDS)
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await _poll(ask, say="Waiting for shard to be ready...")


async def address_ready(address: str) -> None:
    """Return once something listens at `address`: a shard does so once its model is loaded."""
    host, _, port = address.rpartition(":")
    # All interfaces are asked at one of them.
    host = {"0.0.0.0": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))  # noqa: S104

    async def ask() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            return False
        writer.close()
        return True

    await _poll(ask, say="Waiting for shard to be ready...")


async def router_ready(base: str) -> None:
    """Return once `{base}/health` answers 200."""

    async def ask() -> bool:
        with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
            # Python 3.11's `wait_for` may lose a cancellation that arrives with the awaited result.
            async with asyncio.timeout(ASK_SECONDS):
                return await _status(f"{base}/health") == 200
        return False

    await _poll(ask, say="Waiting for the router to be ready...")


async def _poll(ask: Callable[[], Awaitable[bool]], *, say: str) -> None:
    """Ask until the answer is yes; log `say` every SAY_SECONDS."""
    logged_at = time.monotonic()
    while not await ask():
        if time.monotonic() - logged_at >= SAY_SECONDS:
            log.info("%s", say)
            logged_at = time.monotonic()
        await asyncio.sleep(POLL_SECONDS)


def _unverified() -> ssl.SSLContext:
    """TLS to the router on this host, whose certificate names another."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def _status(url: str) -> int:
    """The status of a GET. Raises OSError, ValueError or IndexError without one."""
    parts = urlsplit(url)
    tls = _unverified() if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        request = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
