"""The HTTP client of all benchmarks: pages, answers in one piece, and streams."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

import aiohttp

from millrace.load.apis import BadStreamError
from millrace.load.load import READ_TIMEOUT_SECONDS

FAILURES = (BadStreamError, aiohttp.ClientError, TimeoutError)
"""Exceptions that a request may raise."""


class HttpClient:
    """Any number of connections to one server; use as an asynchronous context manager."""

    def __init__(self, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_SECONDS)
        self._session = aiohttp.ClientSession(
            base_url=url,
            timeout=timeout,
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def text(self, path: str) -> str:
        """The page at `path`; raises aiohttp.ClientError."""
        async with self._session.get(path, raise_for_status=True) as response:
            return await response.text()

    async def json(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Status and JSON of an answer in one piece; raises aiohttp.ClientError or TimeoutError."""
        async with self.post(path, body) as response:
            return response.status, await response.json()

    def post(
        self, path: str, body: Mapping[str, Any]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The answer to a POST, unread; raises one of FAILURES."""
        return self._session.post(path, json=body)


async def check(response: aiohttp.ClientResponse) -> None:
    """Raise BadStreamError with the status and the beginning of the body unless the status is 200."""
    if response.status != 200:
        raise BadStreamError(f"status {response.status}: {(await response.text())[:200]}")
