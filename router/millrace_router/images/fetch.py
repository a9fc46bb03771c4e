"""Fetches pictures from the hosts that the operator lists, and from nowhere else.

A name is resolved once. All its addresses have to be global, and the connection goes to one of them, so that a later
answer of DNS has no effect. Redirects are not followed, and errors do not say what a host answered.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

FETCH_SECONDS = 5.0
MAX_AT_ONCE = 4
CHUNK_BYTES = 1 << 16
_TRANSLATED = (
    ipaddress.ip_network("64:ff9b::/96"),
    ipaddress.ip_network("64:ff9b:1::/48"),
    ipaddress.ip_network("2002::/16"),
    ipaddress.ip_network("2001::/32"),
)
"""Addresses that hold an IPv4 address, which may be any."""


class FetchError(Exception):
    """The picture was not fetched; the message is for the client."""


def is_global(address: str) -> bool:
    """Return whether an address is one of the public Internet, and nothing in this host or its networks."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or any(ip in network for network in _TRANSLATED):
            return False
        if ip.is_site_local:
            return False
    return ip.is_global and not ip.is_multicast


def checked(url: str, hosts: Collection[str]) -> SplitResult:
    """Return the parts of an address that may be fetched; raises FetchError."""
    if not hosts:
        raise FetchError("is an address: this server takes only `data:` URLs (--image-url-hosts)")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise FetchError("has an address that is not valid") from None
    if parts.scheme.lower() != "https":
        raise FetchError("has an address that does not begin with https:")
    if host not in hosts:
        raise FetchError("is at a host that --image-url-hosts does not list")
    if parts.username is not None or parts.password is not None:
        raise FetchError("has an address with a user name or a password")
    if port not in {None, 443}:
        raise FetchError("has an address with a port")
    return parts


class GlobalResolver(AbstractResolver):
    """Resolves names whose addresses are all global."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Resolve; raises OSError for a name with any other address."""
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        addresses = [(info[0], str(info[4][0])) for info in infos]
        if not addresses or not all(is_global(address) for _, address in addresses):
            raise OSError("not every address of the host is global")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=family,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for family, address in addresses
        ]

    async def close(self) -> None:
        """Nothing is open."""


class ImageFetcher:
    """Fetches pictures of at most `max_bytes` from `hosts`."""

    def __init__(
        self,
        hosts: Collection[str],
        *,
        max_bytes: int,
        resolver: AbstractResolver | None = None,
        seconds: float = FETCH_SECONDS,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._resolver = resolver or GlobalResolver()
        self._seconds = seconds
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def fetch(self, url: str) -> bytes:
        """Return the content at `url`.

        Raises:
            FetchError: the address may not be fetched, or does not yield a picture in time.

        """
        parts = checked(url, self._hosts)
        assert parts.hostname is not None
        if _is_literal(parts.hostname):
            raise FetchError("is at an address without a name")
        try:
            async with self._turns, asyncio.timeout(self._seconds):
                return await self._content(url)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            raise FetchError("cannot be fetched") from None

    async def _content(self, url: str) -> bytes:
        connector = aiohttp.TCPConnector(
            resolver=self._resolver, use_dns_cache=False, force_close=True
        )
        content = bytearray()
        async with (
            aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            ) as session,
            session.get(
                url, allow_redirects=False, headers={"accept": "image/*", "accept-encoding": ""}
            ) as response,
        ):
            # What is packed may be any length, and pictures are packed already.
            if response.status != 200 or "content-encoding" in response.headers:
                raise FetchError("cannot be fetched")
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                content += chunk
                if len(content) > self._max_bytes:
                    raise FetchError(f"has more than {self._max_bytes} bytes")
        return bytes(content)


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
