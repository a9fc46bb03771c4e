"""A client of one server: JSON requests and event streams, on any number of connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Self

import aiohttp
import orjson

from millrace.errors import ConnectionFailed, RequestError, no_server
from millrace.http.sse import EventReader

SILENCE_SECONDS = 600.0
"""Longest wait for the next bytes, since a restart of large shards takes minutes."""


def base_of(url: str) -> str:
    """The address of a server, also from the base URL of OpenAI's clients, which ends in `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def is_url(text: str) -> bool:
    """Whether the text names a server, not a model."""
    return text.startswith(("http://", "https://"))


class Client:
    """A client; use it with `async with`, or `open` and `close`."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.base = base_of(url)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Allow connections, which are made by requests."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def first_model(self) -> str:
        """The first model that the server lists. Raises ConnectionFailed or RequestError."""
        answer = await self.get("/v1/models")
        try:
            models = answer.get("data") or [{}]
            return str(models[0].get("id", "default"))
        except (AttributeError, LookupError, TypeError):
            raise RequestError(200, "error", "/v1/models has no list of models") from None

    async def get(self, path: str) -> Any:  # noqa: ANN401
        """The JSON of a page. Raises ConnectionFailed or RequestError."""
        status, body = await self.ask("GET", path)
        return _checked(status, body)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """The JSON of an answer in one piece. Raises ConnectionFailed or RequestError."""
        status, answer = await self.ask("POST", path, body)
        return _checked(status, answer)

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """The status and the bytes of any answer. Raises ConnectionFailed."""
        content = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._opened.request(
                method, self.base + path, data=content, headers=headers
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._broken(path, error) from error

    async def stream(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of an answer as they come. Raises ConnectionFailed or RequestError, also for an error event."""
        reader = EventReader()
        try:
            async with self._opened.post(self.base + path, json=body) as response:
                if response.status != 200:
                    error = refusal(response.status, await response.read())
                    error.retry_after_seconds = _seconds(response.headers.get("Retry-After"))
                    raise error
                async for chunk in response.content.iter_any():
                    for data in reader.feed(chunk):
                        event = orjson.loads(data)
                        if not isinstance(event, dict):
                            raise RequestError(
                                response.status,
                                "error",
                                f"an event is not an object: {data[:80]!r}",
                            )
                        if event.get("error"):
                            raise refusal(response.status, data)
                        yield event
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise self._broken(path, error) from error
        if reader.rest:
            raise ConnectionFailed(f"{self.base}{path}: the stream ended inside an event")

    @property
    def _opened(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client with `async with`"
        return self._session

    def _broken(self, path: str, error: Exception) -> ConnectionFailed:
        reason = _no_server(self.base, error)
        return ConnectionFailed(
            reason or f"{self.base}{path}: {str(error) or type(error).__name__}"
        )


def _no_server(base: str, error: Exception) -> str | None:
    """The sentence for a server that cannot be reached; None for any other failure."""
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return f"the certificate of {base} is not trusted: {error.certificate_error}"
        case aiohttp.ClientSSLError():
            return f"{base} does not speak HTTPS: try an address that begins with http://"
        case aiohttp.ClientConnectorDNSError():
            return f"no server at {base}: the name {error.host} cannot be resolved"
        case aiohttp.ClientConnectorError():
            return no_server(base, error.os_error)
    return None


def refusal(status: int, body: bytes) -> RequestError:
    """The error of an answer: the server's own words where it is JSON as OpenAI or TGI has it."""
    try:
        payload = orjson.loads(body)
    except ValueError:
        payload = None
    error = payload.get("error", payload) if isinstance(payload, dict) else None
    if isinstance(error, dict):
        kind = str(error.get("type") or error.get("code") or "error")
        return RequestError(status, kind, str(error.get("message") or error))
    if isinstance(error, str) and isinstance(payload, dict):
        return RequestError(status, str(payload.get("error_type") or "error"), error)
    text = body[:200].decode(errors="replace").strip()
    return RequestError(status, "error", f"status {status}: {text}")


def _seconds(text: str | None) -> float | None:
    """The number of seconds in `Retry-After`; None for a date or none."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _checked(status: int, body: bytes) -> Any:  # noqa: ANN401
    if status != 200:
        raise refusal(status, body)
    try:
        return orjson.loads(body)
    except ValueError:
        raise RequestError(status, "error", f"the answer is not JSON: {body[:80]!r}") from None
