"""Named API keys, a key file that changes, and TLS."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hmac import compare_digest
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import trustme
from aiohttp import web

from millrace_launcher.supervision.readiness import router_ready
from millrace_router.access.keys import MAX_BYTES, ApiKeys, KeyFileError, read_keys
from millrace_router.access.tls import ListenerTlsError, listener_tls
from millrace_router.app import create_runner
from millrace_router.config import RouterConfig
from millrace_testing.launcher.deployment import certificate
from millrace_testing.router.edge import FakeBatcher, echo, logging_to, services_over, serving

ASKED = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
KEYS = "search:key-1\nsearch:key-2\nops:key-3"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(KEYS)
    return path


async def test_each_key_opens_every_route_that_needs_one(file: Path) -> None:
    async with serving(api_key_file=file) as edge:
        lower = {"authorization": "bearer key-1"}
        wide = {"authorization": "Bearer  key-1"}
        for headers in (bearer("key-1"), lower, wide, bearer("key-2"), {"x-api-key": "key-3"}):
            assert (await edge.post("/generate", ASKED, headers=headers))[0] == 200
            assert (await edge.get("/v1/quarantine", headers=headers))[0] == 200
        for headers in (
            {},
            bearer("key"),
            bearer("key-4"),
            bearer("search"),
            {"authorization": "Basic key-1"},
            {"authorization": "key-1"},
            {"authorization": "bearer"},
            bearer("search:key-1"),
        ):
            status, body, _ = await edge.post("/generate", ASKED, headers=headers)
            assert (status, body) == (401, "")
            status, body, _ = await edge.post("/v1/messages", {}, headers=headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        assert (await edge.get("/health"))[0] == 200


async def test_the_unnamed_key_works_with_the_named_ones(file: Path) -> None:
    async with serving(api_key="key-0", api_key_file=file) as edge:
        for key, status in (("key-0", 200), ("key-3", 200), ("key-4", 401)):
            assert (await edge.post("/generate", ASKED, headers=bearer(key)))[0] == status


async def test_names_are_logged_and_keys_are_not(file: Path) -> None:
    output = io.BytesIO()
    with logging_to(output):
        async with serving(api_key="key-0", api_key_file=file, fairness="tenant") as edge:
            for key in ("key-2", "key-3", "key-0", "key-4"):
                headers = bearer(key) | {"x-tenant": "made-up"}
                await edge.post("/generate", ASKED, headers=headers)
            tenants = [request.scheduling.tenant for request in edge.batcher.requests]
    lines = [orjson.loads(line)["fields"] for line in output.getvalue().splitlines()]
    told = [(line.get("key_name"), line.get("tenant")) for line in lines]
    assert told == [("search", "search"), ("ops", "ops"), (None, "made-up"), (None, None)]
    assert tenants == ["search", "ops", "made-up"]
    assert b"key-" not in output.getvalue()


async def test_every_key_is_compared_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watching(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return compare_digest(given, expected)

    keys = ApiKeys("key-0", file)
    monkeypatch.setattr("millrace_router.access.keys.compare_digest", watching)
    for given in ("key-0", "key-1", "key-3", "", "k"):
        compared.clear()
        keys.name_of(bearer(given))
        assert compared == [
            pair
            for key in ("key-0", "key-1", "key-2", "key-3")
            for pair in (
                (f"Bearer {given}".encode(), f"Bearer {key}".encode()),
                (b"", key.encode()),
            )
        ]


async def test_a_changed_file_is_read_and_a_bad_one_is_not(file: Path) -> None:
    def status(keys: ApiKeys) -> list[str | None]:
        return [keys.name_of(bearer(key)) for key in ("key-0", "key-1", "key-3", "key-4")]

    keys = ApiKeys("key-0", file)
    assert status(keys) == ["", "search", "ops", None]
    file.write_text("ops:key-4")
    keys.reload()
    assert status(keys) == ["", None, None, "ops"]
    for bad in ("", "ops", "ops:key-3\nme:key-3"):
        file.write_text(bad)
        output = io.BytesIO()
        with logging_to(output):
            keys.reload()
        (line,) = map(orjson.loads, output.getvalue().splitlines())
        assert line["level"] == "ERROR"
        assert line["fields"]["message"] == "the API keys stay as they were"
        assert b"key-3" not in output.getvalue()
        assert status(keys) == ["", None, None, "ops"]


async def test_names_of_adapters_are_for_named_keys_too(file: Path) -> None:
    keys = ApiKeys(None, file)
    assert keys.admit(bearer("key-1"))
    assert not keys.admit({})
    assert ApiKeys(None).admit({})
    assert not ApiKeys("key-0").can_change


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    return path


def test_names_and_keys_are_read_from_the_file(key_file: Path) -> None:
    key_file.write_text(
        "# teams\n\nsearch : sk-1:2\n  # old and new\nops@acme.org:a\r\nops@acme.org:b\nx.y_z-1:wörld"
    )
    assert read_keys(key_file) == [
        ("search", "sk-1:2"),
        ("ops@acme.org", "a"),
        ("ops@acme.org", "b"),
        ("x.y_z-1", "wörld"),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not contain a key"),
        (b"# nothing\n\n", "does not contain a key"),
        (b"a:secret\nsecret", "line 2: must be NAME:KEY"),
        (b":secret", "line 1: must be NAME:KEY"),
        (b"a b:secret", "line 1: must be NAME:KEY"),
        (b"a\xc3\xa4:secret", "line 1: must be NAME:KEY"),
        (b"a" * 65 + b":secret", "line 1: must be NAME:KEY"),
        (b"a:", "line 1: the key is empty, or has white space"),
        (b"a:secret word", "line 1: the key is empty, or has white space"),
        (b"a:secret\x00", "line 1: the key is empty, or has white space"),
        (b"a:secret\nb:secret", "line 2: another name has the same key"),
        (b"a:\xff", "is not UTF-8"),
        (b"#" * (MAX_BYTES + 1), f"has more than {MAX_BYTES} bytes"),
    ],
)
def test_mistakes_are_named_without_the_key(key_file: Path, content: bytes, message: str) -> None:
    key_file.write_bytes(content)
    with pytest.raises(KeyFileError) as error:
        read_keys(key_file)
    assert str(error.value).startswith(str(key_file))
    assert str(error.value).endswith(message)
    assert "secret" not in str(error.value)


def test_a_missing_key_file_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(KeyFileError, match="cannot read"):
            read_keys(path)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_that_all_may_read_is_a_warning(key_file: Path, mode: int, warns: bool) -> None:
    key_file.write_text("a:secret")
    key_file.chmod(mode)
    output = io.BytesIO()
    with logging_to(output):
        read_keys(key_file)
    logged = output.getvalue().decode()
    assert ("every user of this host can read" in logged) == warns
    assert "secret" not in logged


GENERATE = {"inputs": "a", "parameters": {"max_new_tokens": 3}}


def config_of(**given: Any) -> RouterConfig:
    return RouterConfig(model_folder=Path("model"), **given)


@asynccontextmanager
async def serving_config(config: RouterConfig) -> AsyncIterator[str]:
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
    async with serving_config(config) as url, aiohttp.ClientSession() as client:
        async with client.post(f"{url}/generate", json=GENERATE, ssl=trusted) as answer:
            assert (await answer.json())["generated_text"] == " x x x"
        async with client.post(f"{url}/generate_stream", json=GENERATE, ssl=trusted) as answer:
            assert (await answer.text()).count("data:") == 3
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get(f"{url}/health")
        # The launcher asks its own router, whose certificate names another host.
        await asyncio.wait_for(router_ready(url), 60)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_plain_http_on_the_https_port_is_answered_with_a_sentence(
    method: str, tmp_path: Path
) -> None:
    files = certificate(tmp_path, "server", "127.0.0.1")
    config = config_of(ssl_certfile=files.cert, ssl_keyfile=files.key)
    async with serving_config(config) as url, aiohttp.ClientSession() as client:
        plain = url.replace("https://", "http://")
        async with client.request(method, f"{plain}/generate", json=GENERATE) as answer:
            assert answer.status == 400
            assert "https://" in await answer.text()
        await asyncio.wait_for(router_ready(url), 60)


async def test_clients_need_a_certificate_of_the_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = certificate(tmp_path, "server", "127.0.0.1", authority=authority)
    client_files = certificate(tmp_path, "client", "me", authority=authority)
    other_files = certificate(tmp_path, "other", "me")
    config = config_of(ssl_certfile=files.cert, ssl_keyfile=files.key, ssl_ca_certs=files.ca)
    async with serving_config(config) as url, aiohttp.ClientSession() as client:

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


def test_the_listener_has_no_tls_without_flags() -> None:
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
