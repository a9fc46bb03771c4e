"""What the cases ask of a server: exact answers, facts, and the increases of its counters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from millrace.errors import ConnectionFailed, RequestError
from millrace.http.client import Client as HttpClient
from millrace.verify.answers import ExactAnswer, StreamError, answer_from, completion_from
from millrace.verify.questions import COMPLETIONS, Question

MOST_TRIES = 20
LONGEST_PAUSE = 10.0
"""Longest pause between two tries, whatever `Retry-After` says."""
USUAL_PAUSE = 1.0

STEPS = "tgi_batch_inference_count"
PROMPT_STEPS = 'tgi_batch_inference_count{method="prefill"}'
PREEMPTIONS = "millrace_preemptions_total"
LOST = 'millrace_recoveries_total{reason="lost"}'
REPLAYED = "millrace_requests_replayed_total"
DRAFTED = "millrace_speculation_drafted_tokens_total"
ACCEPTED = "millrace_speculation_accepted_tokens_total"

Result = TypeVar("Result")


class ServerError(Exception):
    """The server cannot be reached, or answered with an error."""


class Client:
    """The client of one server; several threads may use it. Each call has its own connection and event loop."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._api_key = api_key

    def info(self) -> dict[str, Any]:
        """The object of `/info`. Raises ServerError."""
        info = self._ask(lambda client: client.get("/info"))
        if not isinstance(info, dict):
            raise ServerError(f"{self.url}/info is not an object")
        return info

    def adapters(self) -> tuple[str, ...]:
        """Names of the server's LoRA adapters, from `/v1/models`. Raises ServerError."""
        models = self._ask(lambda client: client.get("/v1/models"))["data"]
        return tuple(model["id"] for model in models if model.get("parent") is not None)

    def token_ids(self, text: str) -> tuple[int, ...]:
        """The token ids of a text from `/tokenize`. Raises ServerError."""
        tokens = self._ask(lambda client: client.post("/tokenize", {"inputs": text}))
        return tuple(token["id"] for token in tokens)

    def metrics(self) -> dict[str, float]:
        """The values of `/metrics` by series, with its labels. Raises ServerError."""
        _, body = self._ask(lambda client: client.ask("GET", "/metrics"))
        lines = (line for line in body.decode().splitlines() if line and not line.startswith("#"))
        pairs = (line.rpartition(" ") for line in lines)
        return {name: float(value) for name, _, value in pairs}

    def answer(
        self, question: Question, on_token: Callable[[], None] = lambda: None
    ) -> ExactAnswer:
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

    def _try(
        self, question: Question, on_token: Callable[[], None]
    ) -> tuple[ExactAnswer, float | None]:
        """An answer, and the seconds before the next try after 429."""
        events: list[dict[str, Any]] = []

        async def stream(client: HttpClient) -> None:
            async for event in client.stream(question.route, question.body):
                events.append(event)
                on_token()

        try:
            self._run(stream)
        except RequestError as error:
            if error.status != HTTPStatus.OK:
                is_full = error.status == HTTPStatus.TOO_MANY_REQUESTS
                failure = ExactAnswer(error=f"status {error.status}: {error}")
                return failure, _pause(error) if is_full else None
            events.append({"error": str(error)})
        except ConnectionFailed as error:
            return ExactAnswer(error=f"the connection broke: {error}"), None
        read = completion_from if question.route == COMPLETIONS else answer_from
        try:
            return read(events), None
        except StreamError as error:
            return ExactAnswer(error=str(error)), None

    def _ask(self, call: Callable[[HttpClient], Awaitable[Result]]) -> Result:
        """Raises ServerError."""
        try:
            return self._run(call)
        except ConnectionFailed as error:
            raise ServerError(str(error)) from error
        except RequestError as error:
            raise ServerError(f"status {error.status}: {error}") from error

    def _run(self, call: Callable[[HttpClient], Awaitable[Result]]) -> Result:
        """Raises ConnectionFailed or RequestError."""

        async def run() -> Result:
            async with HttpClient(self.url, self._api_key) as client:
                return await call(client)

        return asyncio.run(run())


def _pause(error: RequestError) -> float:
    """Seconds before the next try."""
    seconds = USUAL_PAUSE if error.retry_after_seconds is None else error.retry_after_seconds
    return max(0.0, min(seconds, LONGEST_PAUSE))


class Counted:
    """Increases of counters; zero until the block has ended."""

    def __init__(self) -> None:
        self._before: Mapping[str, float] = {}
        self._after: Mapping[str, float] = {}

    def of(self, name: str) -> int:
        """The increase of the series of this name, or of all series with this name and labels."""
        return int(_total(self._after, name) - _total(self._before, name))

    def between(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Set the values at both ends."""
        self._before, self._after = before, after


@contextmanager
def counting(client: Client) -> Iterator[Counted]:
    """Count during the block. Raises ServerError."""
    before, counted = client.metrics(), Counted()
    yield counted
    counted.between(before, client.metrics())


def _total(metrics: Mapping[str, float], name: str) -> float:
    return sum(
        value
        for series, value in metrics.items()
        if series == name or series.startswith(f"{name}{{")
    )
