"""An HTTP client of a server, with one connection for each request."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from millrace_launcher.verify.requests.completions import completion_from
from millrace_launcher.verify.requests.question import COMPLETIONS, Question
from millrace_launcher.verify.servers.answers import Answer, StreamError, answer_from, message_of

SILENCE_SECONDS = 600.0
"""Longest wait for the next bytes, since a restart of large shards takes minutes."""
DATA = b"data:"
DONE = b"[DONE]"
"""The last event of OpenAI's streams."""
MOST_TRIES = 20
LONGEST_PAUSE = 10.0
"""Longest pause between two tries, whatever `Retry-After` says."""


class ServerError(Exception):
    """The server cannot be reached, or answered with an error."""


class Client:
    """The client of one server; several threads may use it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` begins with http:// or https://, and may have a path. Raises ServerError for any other."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url} is no http:// or https:// address")
        self.url = url.rstrip("/")
        self._connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def is_ready(self) -> bool:
        """Whether `/readyz` answers 200."""
        try:
            with self._asked("GET", "/readyz") as response:
                return response.status == 200
        except ServerError:
            return False

    def info(self) -> dict[str, Any]:
        """The object of `/info`. Raises ServerError."""
        with self._asked("GET", "/info") as response:
            found = _json(response)
        if not isinstance(found, dict):
            raise ServerError(f"{self.url}/info is no object")
        return found

    def adapters(self) -> tuple[str, ...]:
        """Names of the server's LoRA adapters, from `/v1/models`. Raises ServerError."""
        with self._asked("GET", "/v1/models") as response:
            models = _json(response)["data"]
        return tuple(model["id"] for model in models if model.get("parent") is not None)

    def token_ids(self, text: str) -> tuple[int, ...]:
        """The token ids of a text from `/tokenize`. Raises ServerError."""
        with self._asked("POST", "/tokenize", {"inputs": text}) as response:
            return tuple(token["id"] for token in _json(response))

    def metrics(self) -> dict[str, float]:
        """The values of `/metrics` by series, with its labels. Raises ServerError."""
        with self._asked("GET", "/metrics") as response:
            text = _body(response).decode()
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        pairs = (line.rpartition(" ") for line in lines)
        return {name: float(value) for name, _, value in pairs}

    def answer(self, question: Question, on_token: Callable[[], None] = lambda: None) -> Answer:
        """Ask the question's route; `on_token` is called for each event. The answer has the error, if any.

        After 429 the request is repeated, up to `MOST_TRIES` tries.
        """
        answer, pause = self._try(question, on_token)
        for _ in range(MOST_TRIES - 1):
            if pause is None:
                break
            time.sleep(pause)
            answer, pause = self._try(question, on_token)
        return answer

    def _try(self, question: Question, on_token: Callable[[], None]) -> tuple[Answer, float | None]:
        """An answer, and the seconds before the next try after 429."""
        pause = None
        read = completion_from if question.route == COMPLETIONS else answer_from
        try:
            with self._asked("POST", question.route, question.body) as response:
                if response.status == HTTPStatus.TOO_MANY_REQUESTS:
                    pause = _seconds_until_retry(response)
                if response.status != HTTPStatus.OK:
                    _json(response)
                return read(_events(response, on_token)), None
        except (ServerError, StreamError) as error:
            return Answer(error=str(error)), pause
        except (OSError, HTTPException) as error:
            return Answer(error=f"the connection broke: {error!r}"), None

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request; the response can be read inside the block. Raises ServerError."""
        connection = self._connect(self._host, self._port, timeout=SILENCE_SECONDS)
        try:
            content = None if body is None else json.dumps(body).encode()
            try:
                connection.request(method, self._path + path, content, self._headers)
                response = connection.getresponse()
            except (OSError, HTTPException) as error:
                raise ServerError(f"{self.url}{path} cannot be reached: {error}") from error
            with response:
                yield response
        finally:
            connection.close()


def _seconds_until_retry(response: HTTPResponse) -> float:
    """The seconds in `Retry-After`, else 1."""
    try:
        seconds = float(response.headers.get("Retry-After", "1"))
    except ValueError:
        seconds = 1.0
    return max(0.0, min(seconds, LONGEST_PAUSE))


def _events(response: HTTPResponse, on_token: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """The events of a stream as they arrive."""
    for line in response:
        if line.startswith(DATA):
            data = line[len(DATA) :].strip()
            if data == DONE:
                return
            try:
                event: dict[str, Any] = json.loads(data)
            except ValueError:
                raise StreamError(f"an event is not JSON: {line[:80]!r}") from None
            yield event
            on_token()


def _json(response: HTTPResponse) -> Any:  # noqa: ANN401
    """The JSON of the body. Raises ServerError with the server's message unless the status is 200."""
    body = _body(response)
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if response.status != 200:
        error = found.get("error") if isinstance(found, dict) else None
        words = message_of(error) if error else body[:200].decode(errors="replace")
        raise ServerError(f"status {response.status}: {words}")
    if found is None:
        raise ServerError(f"the answer is not JSON: {body[:80]!r}")
    return found


def _body(response: HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, HTTPException) as error:
        raise ServerError(f"the connection broke: {error!r}") from error
