"""HTTPS on the router's port, with and without certificates of clients."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
from aiohttp import web

from millrace_launcher.supervision.readiness import router_ready
from millrace_router.access.tls import ListenerTlsError, listener_tls
from millrace_router.app import create_runner
from millrace_router.config import RouterConfig
from millrace_testing.launcher.certificates import certificate
from millrace_testing.router.edge import FakeBatcher, echo, services_over

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 3}}


def config_of(**given: Any) -> RouterConfig:
    return RouterConfig(model_folder=Path("model"), **given)


@asynccontextmanager
async def served(config: RouterConfig) -> AsyncIterator[str]:
    """A server with this TLS, and its URL."""
    services = services_over(FakeBatcher(echo))
    runner = create_runner(services)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=listener_tls(config)).start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        services.tokenizer.close()


async def test_answers_and_streams_come_over_https(tmp_path: Path) -> None:
    files = certificate(tmp_path, "server", "127.0.0.1")
    config = config_of(ssl_certfile=files.cert, ssl_keyfile=files.key)
    trusted = ssl.create_default_context(cafile=files.ca)
    async with served(config) as url, aiohttp.ClientSession() as client:
        async with client.post(f"{url}/generate", json=ASKED, ssl=trusted) as answer:
            assert (await answer.json())["generated_text"] == " x x x"
        async with client.post(f"{url}/generate_stream", json=ASKED, ssl=trusted) as answer:
            assert (await answer.text()).count("data:") == 3
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get(f"{url}/health")
        # The launcher asks its own router, whose certificate names another host.
        await asyncio.wait_for(router_ready(url), 60)


async def test_clients_need_a_certificate_of_the_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = certificate(tmp_path, "server", "127.0.0.1", authority=authority)
    client_files = certificate(tmp_path, "client", "me", authority=authority)
    other_files = certificate(tmp_path, "other", "me")
    config = config_of(ssl_certfile=files.cert, ssl_keyfile=files.key, ssl_ca_certs=files.ca)
    async with served(config) as url, aiohttp.ClientSession() as client:

        async def status(cert: Path | None, key: Path | None) -> int:
            trusted = ssl.create_default_context(cafile=files.ca)
            if cert is not None:
                trusted.load_cert_chain(cert, key)
            async with client.get(f"{url}/health", ssl=trusted) as answer:
                return answer.status

        assert await status(client_files.cert, client_files.key) == 200
        for cert, key in ((None, None), (other_files.cert, other_files.key)):
            with pytest.raises((aiohttp.ClientError, OSError)):
                await status(cert, key)


def test_without_flags_there_is_none() -> None:
    assert listener_tls(config_of()) is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"ssl_certfile"}, "HTTPS needs --ssl-keyfile too"),
        ({"ssl_keyfile"}, "HTTPS needs --ssl-certfile too"),
        ({"ssl_ca_certs"}, "HTTPS needs --ssl-certfile too"),
        ({"ssl_certfile", "ssl_keyfile"}, "cannot be used for HTTPS"),
    ],
)
def test_missing_or_wrong_files_are_refused(tmp_path: Path, names: set[str], message: str) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    with pytest.raises(ListenerTlsError, match=message):
        listener_tls(config_of(**dict.fromkeys(names, nothing)))


def test_a_missing_authority_is_refused(tmp_path: Path) -> None:
    files = certificate(tmp_path, "server")
    given = {"ssl_certfile": files.cert, "ssl_keyfile": files.key, "ssl_ca_certs": tmp_path / "no"}
    with pytest.raises(ListenerTlsError, match="no cannot be used for HTTPS"):
        listener_tls(config_of(**given))
