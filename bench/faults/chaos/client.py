"""Sends requests, compares each answer with the undisturbed one, and retries where the contract says so."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import aiohttp
import orjson

from bench.faults.chaos.allowed_errors import AllowedError, AllowedErrors
from bench.faults.chaos.answers import (
    Answer,
    EventReader,
    difference,
    flaws,
    nearest,
    prefix_difference,
)
from bench.faults.chaos.audit import Ledger, refusal_flaws
from bench.faults.chaos.malformed import RawRequest
from bench.faults.chaos.pauses import Arrivals
from bench.faults.chaos.population import Request

ATTEMPT_SECONDS = 180.0
"""An answer that takes longer counts as not ended."""
BACK_OFF_SECONDS = 0.1
MOST_PATIENT_SECONDS = 1.0
CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError)
BROKEN_OFF = "connection reset with the router, sent again"
REFUSED = "refused with 429, sent again"
UNAVAILABLE = "adapter unavailable with 503, sent again"
FORGOTTEN = "adapter forgotten with the router"
RESUMED = "connection reset with the router, resumed with its key"
RIGHT = "answered, right bytes"
WRONG = "wrong"
KEYED = 3
"""One stream in this many has an `Idempotency-Key`, unless it has an adapter, which a router may forget."""
LEFT = "left mid-answer by the client"


class Client:
    """Many clients of one server; use as an asynchronous context manager."""

    def __init__(
        self, url: str, *, ledger: Ledger, allowed: AllowedErrors, arrivals: Arrivals
    ) -> None:
        self.ledger = ledger
        self.allowed = allowed
        self.arrivals = arrivals
        self.references: dict[str, list[Answer]] = {}
        """Answers of the undisturbed run by name of the request; one for each version of its adapter."""
        self.open: set[int] = set()
        """Numbers of the requests that have not ended."""
        self._numbers, self._streams = count(), count()
        self._name = secrets.token_hex(4)
        # A kept-alive connection may be closed at the moment of its use; such a reset would not be an error.
        self._session = aiohttp.ClientSession(
            base_url=url,
            timeout=aiohttp.ClientTimeout(total=ATTEMPT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def refer(self, request: Request) -> None:
        """Keep the answer of the undisturbed server as a further reference."""
        answer = await self._attempt(request)
        for flaw in [answer.broken] if answer.broken else flaws(request, answer):
            self.ledger.wrong(f"undisturbed, {request.name}: {flaw}")
        self.references.setdefault(request.name, []).append(answer)

    async def ask(
        self,
        request: Request,
        *,
        may_be_refused: bool = False,
        version: int | None = None,
        since: float | None = None,
        began: asyncio.Event | None = None,
    ) -> None:
        """Send until it is answered, and check; with `may_be_refused` a 429 counts as an answer.

        With `version` it has to be answered by this version of its adapter. `since` is when the operator named the
        adapter, or the version, to the router, which forgets it when it is killed. `began` is set with the first event.
        """
        number = next(self._numbers)
        self.open.add(number)
        began = began or asyncio.Event()
        is_keyed = request.streams and not request.adapter and number % KEYED == 0
        try:
            for attempt in count():
                start = time.monotonic()
                key = f"{self._name}-{number}-{attempt}" if is_keyed else None
                answer = await self._attempt(request, began, key)
                is_lost = since is not None and self._may_be_forgotten(since)
                if is_lost and answer.status == 404:
                    self.ledger.count(FORGOTTEN)
                    return
                expected = self.references[request.name]
                if version is not None and not is_lost:
                    expected = expected[version : version + 1]
                if await self._is_settled(
                    request, answer, expected, start, may_be_refused=may_be_refused
                ):
                    return
        finally:
            began.set()
            self.open.discard(number)

    async def leave(self, request: Request, *, after_events: int, after_seconds: float) -> None:
        """Send, and disconnect after this many events or seconds, whichever comes first."""
        answer, start = Answer(), time.monotonic()
        with suppress(TimeoutError):
            async with asyncio.timeout(after_seconds):
                await self._read(request, answer, most_events=after_events)
        self.ledger.count(LEFT)
        self._check_break(request, answer, start, left=True)

    async def post_raw(self, bad: RawRequest, path: str) -> None:
        """Post it until it is answered, and check the status."""
        while True:
            start = time.monotonic()
            answer = Answer()
            try:
                async with self._session.post(
                    path, data=bad.content, headers=bad.headers
                ) as response:
                    answer.status = response.status
                    body = await response.read()
            except CONNECTION_ERRORS as error:
                answer.broken = repr(error)
                answer.connected = not isinstance(error, aiohttp.ClientConnectorError)
                # A server that refuses a body unread may close the connection while the client still sends.
                if 413 not in bad.statuses and self._check_reset(bad.name, answer, start):
                    return
                if 413 in bad.statuses:
                    self.ledger.count("oversized body cut off")
                    return
                await asyncio.sleep(BACK_OFF_SECONDS)
                continue
            if answer.status == 503 and self._is_allowed(AllowedError.FETCHES, start):
                self.ledger.count(UNAVAILABLE)
                await asyncio.sleep(MOST_PATIENT_SECONDS)
                continue
            break
        if answer.status == 429 and self._is_allowed(AllowedError.REFUSALS, start):
            self.ledger.count("raw request refused with 429")
        elif answer.status not in bad.statuses:
            self.ledger.count(WRONG)
            self.ledger.wrong(f"{bad.name} to {path} got {answer.status}: {body[:200]!r}")
        else:
            self.ledger.count("raw request, right status")

    async def _is_settled(
        self,
        request: Request,
        answer: Answer,
        expected: Sequence[Answer],
        start: float,
        *,
        may_be_refused: bool,
    ) -> bool:
        """Check an answer; whether it is the last."""
        if answer.broken:
            if self._check_break(request, answer, start, left=False):
                return True
            await asyncio.sleep(BACK_OFF_SECONDS)
            return False
        if answer.status == 429 and self._is_allowed(AllowedError.REFUSALS, start):
            self.ledger.count("refused with 429, not sent again" if may_be_refused else REFUSED)
            self.ledger.seconds["until a 429"].append(time.monotonic() - start)
            return await self._refused(request, answer, "overloaded", final=may_be_refused)
        if answer.status == 503 and self._is_allowed(AllowedError.FETCHES, start):
            self.ledger.count(UNAVAILABLE)
            return await self._refused(request, answer, "unavailable", final=False)
        found = flaws(request, answer)
        if not found and (differs := nearest(difference(answer, one) for one in expected)):
            found = [differs]
        self.ledger.count(WRONG if found else RIGHT)
        for flaw in found:
            self.ledger.wrong(f"{request.name}: {flaw}")
        return True

    async def _refused(
        self, request: Request, answer: Answer, error_type: str, *, final: bool
    ) -> bool:
        body = answer.events[0] if answer.events else None
        for flaw in refusal_flaws(answer.headers, body, error_type=error_type):
            self.ledger.wrong(f"{request.name}: {flaw}")
        if not final:
            after = answer.headers.get("retry-after", "")
            seconds = float(after) if after.isdecimal() else 0.0
            await asyncio.sleep(min(max(seconds, BACK_OFF_SECONDS), MOST_PATIENT_SECONDS))
        return final

    def _check_break(self, request: Request, answer: Answer, start: float, *, left: bool) -> bool:
        """Compare a broken answer as a prefix; whether the break itself is a violation."""
        if request.streams and answer.status == 200:
            references = self.references[request.name]
            differs = nearest(prefix_difference(answer, one) for one in references)
            if differs is not None:
                self.ledger.wrong(f"{request.name}, broken off: {differs}")
        if left and not answer.broken:
            return False
        return self._check_reset(request.name, answer, start)

    def _check_reset(self, name: str, answer: Answer, start: float) -> bool:
        """Whether the break of a connection is a violation."""
        if answer.connected and self._is_allowed(AllowedError.RESETS, start):
            self.ledger.count(BROKEN_OFF)
            return False
        self.ledger.count(WRONG)
        self.ledger.wrong(f"{name}: {answer.broken}")
        return True

    def _may_be_forgotten(self, since: float) -> bool:
        errors = (AllowedError.RESETS, AllowedError.FORGETS)
        return any(self._is_allowed(error, since) for error in errors)

    def _is_allowed(self, error: AllowedError, start: float) -> bool:
        return self.allowed.allow(error, start, time.monotonic())

    async def _attempt(
        self, request: Request, began: asyncio.Event | None = None, key: str | None = None
    ) -> Answer:
        """Send a request once; one with a key is resumed until its answer has ended."""
        answer, start = Answer(), time.monotonic()
        try:
            await self._read(request, answer, began=began, key=key)
            while (
                key is not None and answer.broken and self._is_allowed(AllowedError.RESETS, start)
            ):
                await asyncio.sleep(BACK_OFF_SECONDS)
                self.ledger.count(RESUMED)
                answer.resume()
                await self._read(request, answer, began=began, key=key)
        except TimeoutError:
            answer.broken = f"not ended within {ATTEMPT_SECONDS:g} s"
        return answer

    async def _read(
        self,
        request: Request,
        answer: Answer,
        *,
        most_events: int = 0,
        began: asyncio.Event | None = None,
        key: str | None = None,
    ) -> None:
        """Read into `answer`, to the end or up to `most_events`; raises TimeoutError."""
        answer.sent = time.monotonic()
        headers = {} if key is None else {"idempotency-key": key}
        if answer.last_id:
            headers["last-event-id"] = str(answer.last_id)
        body = dict(request.body)
        try:
            async with self._session.post(request.path, json=body, headers=headers) as response:
                answer.headers = {name.lower(): value for name, value in response.headers.items()}
                answer.status = response.status
                if request.streams and response.status == 200:
                    await self._read_events(response, answer, most_events, began)
                else:
                    answer.take(await response.read())
        except CONNECTION_ERRORS as error:
            if isinstance(error, TimeoutError):
                raise
            answer.broken = repr(error)
            answer.connected = not isinstance(error, aiohttp.ClientConnectorError)
        except orjson.JSONDecodeError as error:
            answer.broken = f"not JSON: {error}"

    async def _read_events(
        self,
        response: aiohttp.ClientResponse,
        answer: Answer,
        most_events: int,
        began: asyncio.Event | None,
    ) -> None:
        reader, stream, num_before = EventReader(), next(self._streams), len(answer.events)
        try:
            async for chunk in response.content.iter_any():
                events = reader.feed(chunk)
                if reader.last_id:
                    answer.last_id = reader.last_id
                    answer.num_numbered = num_before + reader.num_numbered
                for data in events:
                    answer.take(data)
                    self.arrivals.token(stream, time.monotonic())
                    if began is not None:
                        began.set()
                    if len(answer.events) == 1:
                        self.ledger.seconds["first token"].append(time.monotonic() - answer.sent)
                if most_events and len(answer.events) >= most_events:
                    response.close()
                    return
        finally:
            self.arrivals.end(stream)
        if reader.rest.strip():
            answer.broken = f"the stream ended inside an event: {reader.rest[:80]!r}"


def body_bytes(request: Request) -> bytes:
    """The bytes of an HTTP request, for a raw socket."""
    body = orjson.dumps(request.body)
    return (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (request.path.encode(), len(body), body)
    )
