"""Addresses of images lead only to listed hosts at global addresses, and errors say nothing about what is there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from millrace_router.images.fetch import (
    FetchError,
    GlobalResolver,
    ImageFetcher,
    checked,
    is_global,
)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0::1"),
    ],
)
def test_addresses_of_no_public_host_are_refused(address: str) -> None:
    assert not is_global(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111"])
def test_public_addresses_are_accepted(address: str) -> None:
    assert is_global(address)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://img.example/a.png", "https:"),
        ("ftp://img.example/a.png", "https:"),
        ("file:///etc/passwd", "https:"),
        ("https://other.example/a.png", "does not list"),
        ("https://sub.img.example/a.png", "does not list"),
        ("https://img.example.evil/a.png", "does not list"),
        ("https://img.example@evil.example/a.png", "does not list"),
        ("https://user:pass@img.example/a.png", "user name"),
        ("https://img.example:8443/a.png", "port"),
        ("https://img.example:99999/a.png", "not valid"),
        ("https://[::1/a.png", "not valid"),
        ("//img.example/a.png", "https:"),
    ],
)
def test_other_addresses_than_those_of_the_flag_are_refused(url: str, message: str) -> None:
    with pytest.raises(FetchError, match=message):
        checked(url, {"img.example"})


def test_without_the_flag_the_error_names_it() -> None:
    with pytest.raises(FetchError, match="--image-url-hosts"):
        checked("https://img.example/a.png", ())


def resolving_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    resolved: list[str] = []

    async def getaddrinfo(_: object, host: str, port: int, **__: object) -> list[object]:
        resolved.append(host)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, port)) for address in addresses
        ]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return resolved


async def test_a_name_with_one_private_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolving_to(monkeypatch, "8.8.8.8", "127.0.0.1")
    with pytest.raises(OSError, match="global"):
        await GlobalResolver().resolve("img.example", 443)
    with pytest.raises(FetchError, match=r"^cannot be fetched$"):
        await ImageFetcher(["img.example"], max_bytes=99).fetch("https://img.example/")
    assert resolved == ["img.example"] * 2


async def test_a_literal_address_is_refused_even_if_listed() -> None:
    with pytest.raises(FetchError, match="without a name"):
        await ImageFetcher(["127.0.0.1"], max_bytes=99).fetch("https://127.0.0.1/")


class LocalServer(AbstractResolver):
    """Resolves every name to a server of the test, which has no certificate."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.num_asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.num_asked += 1
        return [
            ResolveResult(
                hostname=host,
                host="127.0.0.1",
                port=self.port,
                family=socket.AF_INET,
                proto=0,
                flags=0,
            )
        ]

    async def close(self) -> None: ...


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def fetched(
    handler: Handler, monkeypatch: pytest.MonkeyPatch, *, max_bytes: int = 99, seconds: float = 5.0
) -> bytes:
    """Fetch from a local server over plain HTTP, in place of TLS."""
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    resolver = LocalServer(address[1])
    get = aiohttp.ClientSession.get
    monkeypatch.setattr(
        aiohttp.ClientSession,
        "get",
        lambda self, url, **options: get(self, url.replace("https:", "http:"), **options),
    )
    fetcher = ImageFetcher(["img.example"], max_bytes=max_bytes, resolver=resolver, seconds=seconds)
    try:
        return await fetcher.fetch("https://img.example/a.png")
    finally:
        assert resolver.num_asked == 1
        await runner.cleanup()


async def test_a_listed_host_yields_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.host == "img.example"
        return web.Response(body=b"png")

    assert await fetched(answer, monkeypatch) == b"png"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    resolved: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        resolved.append(request.path)
        return web.Response(status=status, headers={"location": "http://img.example/secret"})

    with pytest.raises(FetchError, match=r"^cannot be fetched$"):
        await fetched(answer, monkeypatch)
    assert resolved == ["/a.png"]


async def test_an_error_says_nothing_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=403, text="secret")

    with pytest.raises(FetchError, match=r"^cannot be fetched$"):
        await fetched(answer, monkeypatch)


async def test_a_body_is_read_only_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(10_000):
            await response.write(bytes(1000))
        return response

    with pytest.raises(FetchError, match="more than 5000 bytes"):
        await fetched(answer, monkeypatch, max_bytes=5000)


async def test_a_host_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"a")
        await closed.wait()
        return response

    with pytest.raises(FetchError, match=r"^cannot be fetched$"):
        await fetched(answer, monkeypatch, seconds=0.2)
