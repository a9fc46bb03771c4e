"""Requests with an idempotency key: a repeated request gets the answer of the first one, finished or still running.

**What is kept, and for how long.** A request with a key runs in its own task, and a repetition attaches to it:
no second generation, no second permit. When no connection reads the answer any more, the run goes on for the grace
period, in which its client may come back, and is aborted after that; the period is 0 by default. The answer stays
available for the grace period after its end, unless the run failed before its first byte: the next try may succeed.
At most `MAX_KEPT_RUNS` ended runs with `MAX_KEPT_BYTES` of answers are kept, and the least recently used one goes
first. Runs that have not ended hold a permit each; those without readers are at most a quarter of all permits, and end
first where others need permits. Those that a killed router has left do not count, end after these, and can be continued
once more. The recording of a stream has its own limit (`recording.py`). As long as a run is kept, it is in the log for
the next router (`run_log.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from itertools import chain, islice
from typing import Protocol

import structlog

from millrace_router.errors import RouterError, ShuttingDown, ValidationError
from millrace_router.request.adapter import ADAPTER_TOKEN_HEADER
from millrace_router.request.continuation import Answer
from millrace_router.request.scheduling import named_tenant, presented_key
from millrace_router.server.recording import Recording

KEY_HEADER = "idempotency-key"
LAST_EVENT_HEADER = "last-event-id"
MAX_KEY_LENGTH = 255
MAX_LAST_EVENT = 10**9 - 1
AWAITED_SECONDS = 30.0
"""Time that a client has to come back after the death of a router, if `--resume-grace` is shorter."""
MAX_KEPT_RUNS = 1024
MAX_KEPT_BYTES = 2**26
"""64 MiB, for all answers that have ended."""
TRANSIENT = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
"""Statuses of failures after which the next try may succeed."""

log = structlog.get_logger(__name__)


def digest_of(*parts: str | bytes) -> bytes:
    """Hash `parts` to 32 bytes; other parts, or other borders between them, have another hash."""
    digest = blake2b(digest_size=32)
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8) + data)
    return digest.digest()


def scope_of(headers: Mapping[str, str], path: str) -> bytes | None:
    """Hash the key of a request with its caller and its route; None without a key; raises ValidationError.

    The same key of another caller or on another route has another hash.
    """
    key = headers.get(KEY_HEADER)
    return None if key is None else owned_key(headers, key) + digest_of(path)


def owned_key(headers: Mapping[str, str], key: str) -> bytes:
    """Hash a key with its caller, the triple of API key, tenant and the token for adapters; raises ValidationError.

    It is the beginning of the key's scope on each route.
    """
    if not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise ValidationError(
            f"`{KEY_HEADER}` must have 1 to {MAX_KEY_LENGTH} characters. Given: {len(key)}"
        )
    return digest_of(*_caller_of(headers), key)


def caller_digest(headers: Mapping[str, str]) -> bytes:
    """Hash the caller of a request, without the key of the request."""
    return digest_of(*_caller_of(headers))


def _caller_of(headers: Mapping[str, str]) -> tuple[str, str, str]:
    token = headers.get(ADAPTER_TOKEN_HEADER, "")
    return presented_key(headers), named_tenant(headers), token


def last_event_of(headers: Mapping[str, str]) -> int:
    """Return the number of tokens that the client has; 0 without the header. Raises ValidationError."""
    text = headers.get(LAST_EVENT_HEADER)
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text)):
        raise unknown_event()
    return int(text)


def other_body() -> ValidationError:
    """Make the error for a key that comes with another body than before."""
    return ValidationError(f"`{KEY_HEADER}` has been used for a request with another body")


def unknown_event() -> ValidationError:
    """Make the error for an event id that the stream does not have."""
    return ValidationError(f"`{LAST_EVENT_HEADER}` must be the id of an event of this stream")


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer in one piece."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Run:
    """One request with a key, and its answer as far as there is one."""

    def __init__(self, body_digest: bytes) -> None:
        self.body_digest = body_digest
        self.num_readers = 0
        self.recorded: Answer | None = None
        """What records its tokens, if anything does."""
        self.recorder: Recorder | None = None
        self.park: Callable[[], None] | None = None
        """Lets a run that another router has begun wait for its client again; `recorder` does not have it then."""
        self.is_continued = False
        """Whether another router has begun it."""
        self.is_awaited = False
        """Whether another router had its client, which may come back."""
        self.ended = False
        self.on_end: list[Callable[[], None]] = []
        """Called when it has ended."""
        self.recording: Recording | None = None
        self._outcome: WholeAnswer | Exception | None = None
        self._known = asyncio.Event()

    def record(self, recording: Recording) -> None:
        self.recording = recording
        self._known.set()

    def finish(self, outcome: WholeAnswer | Exception | None) -> None:
        """End the run with the answer in one piece, or the failure; with None after a stream."""
        self.ended = True
        self._outcome = outcome
        if self.recording is not None and isinstance(outcome, Exception):
            self.recording.fail(outcome)
        self._known.set()
        for call in tuple(self.on_end):
            call()

    async def answer(self) -> WholeAnswer | Recording:
        """Wait for the answer in one piece or the beginning of a stream; raises the failure of the request."""
        await self._known.wait()
        if self.recording is not None:
            return self.recording
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    @property
    def is_worth_keeping(self) -> bool:
        """Whether there is an answer that a client may request again."""
        if self.recording is not None:
            return self.failure is None
        return isinstance(self._outcome, WholeAnswer)

    @property
    def failure(self) -> Exception | None:
        """The error of a run that has failed before the first byte of its answer."""
        if self.recording is not None:
            return self.recording.error
        return self._outcome if isinstance(self._outcome, Exception) else None

    @property
    def num_bytes(self) -> int:
        if self.recording is not None:
            return self.recording.num_bytes
        return len(self._outcome.body) if isinstance(self._outcome, WholeAnswer) else 0


class Recorder(Protocol):
    """Keeps a run for the next router."""

    def end(self) -> None:
        """Note the end of its answer."""

    def forget(self) -> None:
        """Do not keep it any longer."""


class Timer(Protocol):
    """A call in the future."""

    def cancel(self) -> None:
        """Cancel the call."""


def call_later(seconds: float, callback: Callable[[], None]) -> Timer:
    """Schedule a call on the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, callback)


class Runs:
    """The requests with keys that run or are kept, by their scope."""

    def __init__(
        self,
        grace_seconds: float,
        *,
        call_later: Callable[[float, Callable[[], None]], Timer] = call_later,
        max_kept: int = MAX_KEPT_RUNS,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        max_unread: int | None = None,
    ) -> None:
        """At most `max_unread` runs without readers go on; the one that has been without for longest ends first."""
        self._grace_seconds = grace_seconds
        self._call_later = call_later
        self._max_unread = max_unread
        self._unread: dict[Run, bytes] = {}
        self._awaited: dict[Run, bytes] = {}
        """Runs that another router has begun, whose clients have not come back; they end after the others."""
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._runs: OrderedDict[bytes, Run] = OrderedDict()
        self._tasks: dict[Run, asyncio.Task[WholeAnswer | None]] = {}
        self._timers: dict[Run, Timer] = {}
        self.forgets = True
        """Whether the next router does not get runs that end."""

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, scope: bytes, body_digest: bytes) -> Run | None:
        """Look for a run; raises ValidationError if the key was used for another body."""
        run = self._runs.get(scope)
        if run is None:
            return None
        if run.body_digest != body_digest:
            raise other_body()
        self._runs.move_to_end(scope)
        return run

    def start(
        self,
        scope: bytes,
        body_digest: bytes,
        work: Callable[[Run], Coroutine[None, None, WholeAnswer | None]],
        *,
        is_continued: bool = False,
    ) -> Run:
        """Start a run that `find` did not find; `work` records a stream, or returns an answer in one piece.

        With `is_continued` another router has begun it, and its client may come back for a while.
        """
        run = self._runs[scope] = Run(body_digest)
        if is_continued:
            run.is_continued = run.is_awaited = True
            self._awaited[run] = scope
            self._drop_later(scope, run)
        self._tasks[run] = task = asyncio.create_task(work(run))
        # A task that is cancelled before its first step does not run its `finally`.
        task.add_done_callback(partial(self._end, scope, run))
        return run

    @contextmanager
    def reading(self, scope: bytes, run: Run) -> Iterator[None]:
        """Keep a run alive for the length of the block."""
        run.num_readers += 1
        run.is_awaited = False
        self._spare(run)
        if not run.ended:
            self._stop_timer(run)
        try:
            yield
        finally:
            run.num_readers -= 1
            if not run.num_readers:
                self._on_last_reader_left(scope, run)

    def lend(self, recorder: Recorder) -> tuple[Run, Callable[[bool], None]] | None:
        """Keep the run of `recorder` alive for a client of another router; None if there is no such run.

        Returns it with what ends that: with True the other router is gone, and its client may come back here.
        """
        scope = next((key for key, run in self._runs.items() if run.recorder is recorder), None)
        if scope is None:
            return None
        run = self._runs[scope]
        run.num_readers += 1
        run.is_awaited = False
        self._spare(run)
        if not run.ended:
            self._stop_timer(run)

        def give_back(is_lost: bool) -> None:  # noqa: FBT001
            run.num_readers -= 1
            if run.num_readers or self._runs.get(scope) is not run:
                return
            if is_lost and not run.ended:
                run.is_awaited = True
                self._awaited[run] = scope
                self._drop_later(scope, run)
            else:
                self._on_last_reader_left(scope, run)

        return run, give_back

    def end(self, owned: bytes) -> bool:
        """Abort and forget the runs of an `owned_key`; return whether there were any."""
        matches = [(scope, run) for scope, run in self._runs.items() if scope.startswith(owned)]
        for scope, run in matches:
            self._drop(scope, run)
        return bool(matches)

    def drain(self) -> None:
        """Abort runs without readers, from now on at once: a client that comes back will reach another server."""
        self._grace_seconds = 0.0
        for scope, run in tuple(self._runs.items()):
            if not run.num_readers:
                self._drop(scope, run)

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        for scope, run in tuple(self._runs.items()):
            self._drop(scope, run)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_last_reader_left(self, scope: bytes, run: Run) -> None:
        if not self._grace_seconds:
            self._drop(scope, run)
        elif not run.ended:
            self._drop_later(scope, run)
            self._unread[run] = scope
            if self._max_unread is not None and len(self._unread) > self._max_unread:
                self._drop_unread(1)

    async def make_room(self, count: int) -> None:
        """Abort `count` runs without readers, or all of them, and wait until they have ended."""
        await asyncio.gather(*self._drop_unread(count), return_exceptions=True)

    def _drop_unread(self, count: int) -> list[asyncio.Task[WholeAnswer | None]]:
        """Abort the oldest runs without readers; one that makes room for itself does not end itself."""
        caller = asyncio.current_task()
        is_awaited = any(self._tasks[run] is caller for run in self._awaited)
        runs = chain(self._unread.items(), () if is_awaited else self._awaited.items())
        others = ((run, scope) for run, scope in runs if self._tasks[run] is not caller)
        oldest = list(islice(others, count))
        tasks = [self._tasks[run] for run, _ in oldest]
        for run, scope in oldest:
            if run.is_awaited and run.park is not None:
                run.park()
            self._drop(scope, run)
        return tasks

    def _spare(self, run: Run) -> None:
        """Do not end it any longer where others need permits."""
        self._unread.pop(run, None)
        self._awaited.pop(run, None)

    def _end(self, scope: bytes, run: Run, task: asyncio.Task[WholeAnswer | None]) -> None:
        del self._tasks[run]
        self._spare(run)
        self._stop_timer(run)
        error = ShuttingDown() if task.cancelled() else task.exception()
        if error is None:
            run.finish(task.result())
            if run.recorder is not None and run.failure is None:
                run.recorder.end()
        else:
            if isinstance(error, Exception) and not isinstance(error, RouterError):
                # Without a reader no other place logs the defect.
                log.error("keyed request failed", exc_info=error)
            run.finish(error if isinstance(error, Exception) else ShuttingDown())
        if self._runs.get(scope) is not run:
            return
        if run.park is not None and getattr(run.failure, "status", None) in TRANSIENT:
            run.park()
        if not run.is_worth_keeping or not (self._seconds_of(run) or run.num_readers):
            self._drop(scope, run)
        elif self._seconds_of(run):
            self._drop_later(scope, run)
            self._drop_excess()

    def _drop_excess(self) -> None:
        """Drop ended runs until the others are few and small enough."""
        ended = [(scope, run) for scope, run in self._runs.items() if run.ended]
        num_bytes = sum(run.num_bytes for _, run in ended)
        for count, (scope, run) in zip(range(len(ended), 0, -1), ended, strict=True):
            if count <= self._max_kept and num_bytes <= self._max_kept_bytes:
                return
            num_bytes -= run.num_bytes
            self._drop(scope, run)

    def _drop(self, scope: bytes, run: Run) -> None:
        """Forget a run, and abort it if it still runs; connections that read its answer may finish."""
        self._stop_timer(run)
        self._spare(run)
        if self._runs.get(scope) is run:
            del self._runs[scope]
        if run.recorder is not None and self.forgets:
            run.recorder.forget()
        if (task := self._tasks.get(run)) is not None:
            task.cancel()

    def _seconds_of(self, run: Run) -> float:
        """Return how long a run without readers is kept."""
        return max(self._grace_seconds, AWAITED_SECONDS) if run.is_awaited else self._grace_seconds

    def _drop_later(self, scope: bytes, run: Run) -> None:
        self._timers[run] = self._call_later(self._seconds_of(run), partial(self._drop, scope, run))

    def _stop_timer(self, run: Run) -> None:
        if (timer := self._timers.pop(run, None)) is not None:
            timer.cancel()
