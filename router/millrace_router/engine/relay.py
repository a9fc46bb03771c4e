"""Requests of a router that is being replaced, which the next one computes: what the two say to each other.

The old router keeps its clients, and goes on to render what they get; it sends what it has accepted, with the tokens
that are known, and receives token by token. So every answer is the same as if nothing had happened, whatever its route.
Only the old router looks for the end of a text; the other one ends with it.

A message is a length (4 bytes, little-endian) and JSON. From the old router: `submit` and `close` with the number of a
request. To it: `token`, `pooled` and `failed`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import Any, Protocol, Self

import structlog
from pydantic import BaseModel, ConfigDict

import millrace_router.errors as all_errors
from millrace_router.errors import (
    IncompleteGeneration,
    InternalError,
    RouterError,
    as_failure,
)
from millrace_router.request.continuation import Answer, Beginning, KnownToken, TokenWriter
from millrace_router.request.entry import Entry, check_of
from millrace_router.request.images import GridReduction, PreparedImage, Rows, spans_of
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import PromptLogprobs, TokenEvent, TokenStream

LENGTH = struct.Struct("<I")

log = structlog.get_logger(__name__)


class RelayedImage(BaseModel):
    """A picture of a request, as often as the prompt has it."""

    digest: str
    rows: int
    columns: int
    num_tiles: int
    height: int
    width: int
    rows_per_tile: int
    is_grid: bool = False
    extra_rows: int = 0
    order: Rows = ()
    reduction: GridReduction | None = None
    pixels: str
    """In base64."""

    @classmethod
    def of(cls, image: PreparedImage) -> Self:
        return cls(
            digest=image.digest.hex(),
            rows=image.rows,
            columns=image.columns,
            num_tiles=image.num_tiles,
            height=image.height,
            width=image.width,
            rows_per_tile=image.rows_per_tile,
            is_grid=image.is_grid,
            extra_rows=image.extra_rows,
            order=image.order,
            reduction=image.reduction,
            pixels=b64encode(image.pixels).decode(),
        )

    def prepared(self) -> PreparedImage:
        return PreparedImage(
            digest=bytes.fromhex(self.digest),
            rows=self.rows,
            columns=self.columns,
            num_tiles=self.num_tiles,
            height=self.height,
            width=self.width,
            rows_per_tile=self.rows_per_tile,
            is_grid=self.is_grid,
            extra_rows=self.extra_rows,
            order=self.order,
            reduction=self.reduction,
            pixels=b64decode(self.pixels),
        )


class Submitted(BaseModel):
    """A request and what is known of it. Fields that the other router does not know are refused with the request."""

    model_config = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="strings"
    )
    number: int
    """The number of the request in the old router."""
    request: ValidRequest
    """Without its images, and what only the old router needs: stop sequences, and the recording of its tokens."""
    images: tuple[RelayedImage, ...] = ()
    """The pictures of the prompt, in its order."""
    known: tuple[int, ...] = ()
    """The tokens that it has got."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache; None: it has not been admitted."""
    run: int | None = None
    """Its number in the log of keyed requests, from which the other router may compute it already."""
    choice: int = 0
    """The choice of the run."""
    placeholder: int = 0
    """The token that stands for a row of an image."""

    def whole_request(self) -> ValidRequest:
        """Return the request with its images."""
        if not self.images:
            return self.request
        ids, images = self.request.input_ids, [image.prepared() for image in self.images]
        spans = spans_of(ids, self.placeholder, images)
        return replace(self.request, images=spans)


def submitted(entry: Entry) -> Submitted:
    """Return what another router needs to compute the rest of `entry`."""
    request, stream = entry.request, entry.stream
    scheduling, choice = request.scheduling, request.choice
    if scheduling.max_queue_seconds is not None:
        waited = time.monotonic() - stream.queued_at
        left = max(0.0, scheduling.max_queue_seconds - waited)
        scheduling = replace(scheduling, max_queue_seconds=left)
    # The log lacks candidates and the log probabilities of a prompt.
    is_followed = choice is not None and not (request.top_n_tokens or request.prefill_logprobs)
    return Submitted(
        number=entry.request_id,
        request=replace(
            request,
            images=(),
            stop_sequences=(),
            answer_text=None,
            choice=None,
            scheduling=scheduling,
            prefill_logprobs=entry.wants_prompt_logprobs,
        ),
        images=tuple(RelayedImage.of(span.image) for span in request.images if span.row == 0),
        placeholder=request.input_ids[request.images[0].position] if request.images else 0,
        known=tuple(entry.generated_ids),
        cached_tokens=stream.cached_tokens,
        run=choice.run_number if choice is not None and is_followed else None,
        choice=0 if choice is None else choice.number,
    )


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None after the last."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def packed(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def to_json(*values: object) -> bytes:
    return packed(json.dumps(values).encode())


class Relay:
    """The requests of the old router that the next one computes. No method but `run` waits."""

    def __init__(self, end: Callable[[Entry, RouterError | None], None]) -> None:
        """`end` records the end of an entry, and calls `drop`."""
        self._end = end
        self.entries: dict[int, Entry] = {}
        """By request id, the oldest first."""
        self._writer: asyncio.StreamWriter | None = None

    def add(self, entry: Entry) -> None:
        """Let the other router compute an entry, now or as soon as there is one."""
        self.entries[entry.request_id] = entry
        self._submit(entry)

    def drop(self, entry: Entry) -> None:
        """Forget an entry that has ended."""
        if self.entries.pop(entry.request_id, None) is not None:
            self._write(to_json("close", entry.request_id))

    async def run(self, ours: socket.socket) -> None:
        """Relay through a socket until the other router is gone."""
        reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            for entry in tuple(self.entries.values()):
                self._submit(entry)
            while (message := await read_message(reader)) is not None:
                kind, number, *details = json.loads(message)
                if (known := self.entries.get(number)) is not None:
                    self._take(known, kind, details)
        finally:
            self._writer.close()
            self._writer = None

    def _submit(self, entry: Entry) -> None:
        if self._writer is not None:
            message = submitted(entry).model_dump_json(exclude_defaults=True)
            self._write(packed(b'["submit",' + message.encode() + b"]"))

    def _write(self, data: bytes) -> None:
        if self._writer is not None:
            self._writer.write(data)

    def _take(self, entry: Entry, kind: str, details: list[Any]) -> None:
        """Take what the other router says of an entry."""
        is_last = kind != "token"
        error: RouterError | None = None
        try:
            if kind == "failed":
                error = error_of(*details)
            elif kind == "pooled":
                entry.accept_pooled(details[0])
            else:
                is_last = self._take_token(entry, *details)
        except BaseException as failure:
            as_failure(failure)
            log.exception("a relayed token cannot be delivered")
            is_last, error = True, InternalError()
        if is_last:
            self._end(entry, error)

    def _take_token(
        self,
        entry: Entry,
        token: tuple[int, float, bool],
        top: Sequence[tuple[int, float]],
        is_end: bool,  # noqa: FBT001
        first: dict[str, Any] | None,
    ) -> bool:
        """Deliver a token; return whether the entry ends with it."""
        if first is not None:
            self._begin(entry, first)
        token_id, logprob, entry.is_closed = token
        if entry.accept(token_id, logprob, [(each, value) for each, value in top]):
            return True
        if is_end:
            entry.stream.fail(IncompleteGeneration())
        return is_end

    def _begin(self, entry: Entry, first: dict[str, Any]) -> None:
        """Take what the other router knows at the first token that it has computed."""
        if entry.stream.batched_at is None:
            entry.admitted(time.monotonic(), first["cached_tokens"])
        if first["prompt"] is not None:
            entry.wants_prompt_logprobs = False
            ids = entry.request.input_ids
            logprobs, *candidates = first["prompt"]
            entry.stream.prompt_logprobs = PromptLogprobs(ids, tuple(logprobs), *candidates)


class Feed:
    """A request of the old router in the next one: a recorder and a sink, which pass on what they get."""

    number: int | None = None

    def __init__(self, submitted: Submitted, write: Callable[[bytes], None]) -> None:
        self._number = submitted.number
        self._num_known = len(submitted.known)
        self._write = write
        self._closed = False
        """Whether the limit of tokens closes the text before the next token."""
        self.stream: TokenStream | None = None
        self.cached_tokens: Callable[[], int] = lambda: 0
        """Tokens of the prompt of a run that were in the prefix cache."""
        self._has_begun = False

    def begin(self, _choice: int, _beginning: Beginning) -> None:
        """Note nothing: the first token has what is known with it."""

    def writer(self, _choice: int) -> TokenWriter:
        def write(_token_id: int, _logprob: float, closed: bool) -> None:  # noqa: FBT001
            self._closed = closed

        return write

    def flush(self) -> None:
        """Keep nothing."""

    def expand(self, _expanded: bytes) -> None:
        """Keep nothing."""

    def followed(self, token_id: int, logprob: float, closed: bool) -> None:  # noqa: FBT001
        """Pass a token of a run on, which this router computes by itself."""
        token, first = (token_id, logprob, closed), None
        if not self._has_begun:
            self._has_begun = True
            first = {"cached_tokens": self.cached_tokens(), "prompt": None}
        self._write(to_json("token", self._number, token, (), False, first))  # noqa: FBT003

    def token(self, event: TokenEvent) -> None:
        """Pass a token on, unless it is known."""
        stream = self.stream
        assert stream is not None
        if stream.pooled is not None:
            self._write(to_json("pooled", self._number, list(stream.pooled)))
        elif event.index > self._num_known:
            token = event.token.id, event.token.logprob, self._closed
            top = [(each.id, each.logprob) for each in event.top_tokens]
            is_end = event.finished is not None
            self._write(to_json("token", self._number, token, top, is_end, self._first(stream)))

    def _first(self, stream: TokenStream) -> dict[str, Any] | None:
        if self._has_begun:
            return None
        self._has_begun = True
        prompt = stream.prompt_logprobs
        return {
            "cached_tokens": stream.cached_tokens,
            "prompt": prompt
            and (prompt.logprobs, list(prompt.candidate_ids), list(prompt.candidate_logprobs)),
        }

    def fail(self, error: Exception) -> None:
        """Pass on why it failed."""
        self._write(to_json("failed", self._number, *described(error)))


class Accept(Protocol):
    """Runs a request that another router has accepted, as `Infer.accepted`."""

    def __call__(self, request: ValidRequest, /) -> AbstractContextManager[TokenStream]:
        """Raises RouterError."""


Follow = Callable[[Submitted, Feed], Callable[[bool], None] | None]
"""Passes on what a run of this router computes; returns what ends that, or None if there is no such run.

It is ended with True if the other router is gone.
"""


class RelayedRequests:
    """The requests of one old router in the next one."""

    def __init__(self, accept: Accept, follow: Follow) -> None:
        self._accept = accept
        self._follow = follow
        self._running: dict[int, Callable[[bool], None]] = {}

    async def serve(self, ours: socket.socket) -> None:
        """Compute what comes through a socket, until the old router is gone."""
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            while (message := await read_message(reader)) is not None:
                kind, what = json.loads(message)
                if kind == "submit":
                    self._submit(message, what, writer.write)
                elif (stop := self._running.pop(what, None)) is not None:
                    stop(False)  # noqa: FBT003
        finally:
            for stop in self._running.values():
                stop(True)  # noqa: FBT003
            self._running.clear()
            writer.close()

    def _submit(self, message: bytes, what: dict[str, Any], write: Callable[[bytes], None]) -> None:
        try:
            request = Submitted.model_validate_json(message[len('["submit",') : -1])
        except ValueError as error:
            log.warning("a request of the router before has unknown fields", why=str(error))
            write(to_json("failed", what["number"], *described(InternalError())))
            return
        feed = Feed(request, write)
        try:
            stop = None if request.run is None else self._follow(request, feed)
            self._running[request.number] = stop or self._start(request, feed)
        except Exception as error:  # noqa: BLE001
            # A defect in one request must not end the others.
            feed.fail(error)

    def _start(self, one: Submitted, feed: Feed) -> Callable[[bool], None]:
        """Compute a request from behind its known tokens; returns what ends it."""
        whole = one.whole_request()
        tokens = [KnownToken(0, token_id, 0.0) for token_id in one.known]
        beginnings = {}
        if tokens:
            beginnings[0] = Beginning(one.cached_tokens or 0, check_of(whole))
        answer = Answer(feed, tokens, beginnings, renders_known=False)
        with ExitStack() as stack:
            request = replace(whole, choice=answer.next_choice())
            feed.stream = stack.enter_context(self._accept(request))
            feed.stream.connect(feed)
            close = stack.pop_all().close
        return lambda _is_lost: close()


def described(error: Exception) -> tuple[str, str, dict[str, Any]]:
    """Return the name, the text and the attributes of an error of a request."""
    if not isinstance(error, RouterError):
        log.error("a relayed request failed", exc_info=error)
        error = InternalError()
    attributes = {}
    for name, value in vars(error).items():
        with suppress(TypeError):
            json.dumps(value)
            attributes[name] = value
    return type(error).__name__, str(error), attributes


def error_of(name: str, text: str, attributes: dict[str, Any]) -> RouterError:
    """Make the error that `described` has described."""
    kind = getattr(all_errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, RouterError)):
        return InternalError()
    error = kind.__new__(kind)
    error.args = (text,)
    vars(error).update({**attributes, "is_counted": False})
    return error
