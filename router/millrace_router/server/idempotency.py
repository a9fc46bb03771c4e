"""Requests that carry a key: sent again, they are answered once, by what is already there or still running.

**What is kept, and for how long.** A keyed request runs in a task of its own, and whoever sends it again attaches to
it: no second generation, no second permit. When nobody reads it any more, it has the grace period to be found again by
its client, and is aborted after that; the period is 0 by default. Its answer can be fetched again for as long after
its end, unless it has failed before it said anything: that may go better the next time. At most `MAX_KEPT_RUNS` ended
runs with `MAX_KEPT_BYTES` of answers are kept, and the one that was asked for longest ago goes first. Runs that have
not ended hold a permit each, and a stream's recording is bounded by itself (`recording.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Protocol

import structlog

from millrace_router.errors import RouterError, ShuttingDown, ValidationError
from millrace_router.request.scheduling import presented_key
from millrace_router.server.recording import Recording

KEY_HEADER = "idempotency-key"
LAST_EVENT_HEADER = "last-event-id"
MAX_KEY_LENGTH = 255
MAX_LAST_EVENT = 10**9 - 1
MAX_KEPT_RUNS = 1024
MAX_KEPT_BYTES = 2**26
"""64 MiB, of all answers that have ended."""

log = structlog.get_logger(__name__)


def digest_of(*parts: str | bytes) -> bytes:
    """32 bytes that stand for `parts` and for no others."""
    digest = blake2b(digest_size=32)
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8) + data)
    return digest.digest()


def scope_of(headers: Mapping[str, str], path: str) -> bytes | None:
    """What the key of a request names: no other caller, and no other route, means the same by it.

    None without a key; raises ValidationError. The caller is whoever has both the same API key and the same tenant.
    """
    key = headers.get(KEY_HEADER)
    if key is None:
        return None
    if not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise ValidationError(
            f"`{KEY_HEADER}` must have 1 to {MAX_KEY_LENGTH} characters. Given: {len(key)}"
        )
    return digest_of(presented_key(headers), headers.get("x-tenant", ""), path, key)


def last_event_of(headers: Mapping[str, str]) -> int:
    """How many tokens the client says it has; 0 if it says nothing. Raises ValidationError."""
    text = headers.get(LAST_EVENT_HEADER)
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text)):
        raise unknown_event()
    return int(text)


def unknown_event() -> ValidationError:
    """Make the error for an event that no stream of ours has sent."""
    return ValidationError(f"`{LAST_EVENT_HEADER}` must be the id of an event of this stream")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in one piece."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Run:
    """One keyed request, and what there is of its answer."""

    def __init__(self, body_digest: bytes) -> None:
        self.body_digest = body_digest
        self.num_readers = 0
        self.ended = False
        self.recording: Recording | None = None
        self._outcome: Answer | Exception | None = None
        self._known = asyncio.Event()

    def record(self, recording: Recording) -> None:
        """Answer with a stream."""
        self.recording = recording
        self._known.set()

    def finish(self, outcome: Answer | Exception | None) -> None:
        """Take note of the end, with the answer in one piece or what came instead; None after a stream."""
        self.ended = True
        self._outcome = outcome
        if self.recording is not None and isinstance(outcome, Exception):
            self.recording.fail(outcome)
        self._known.set()

    async def answer(self) -> Answer | Recording:
        """Wait for the answer in one piece or the beginning of a stream; raises what the request has failed with."""
        await self._known.wait()
        if self.recording is not None:
            return self.recording
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it has said anything that a client may want to hear again."""
        if self.recording is not None:
            return self.recording.error is None
        return isinstance(self._outcome, Answer)

    @property
    def num_bytes(self) -> int:
        """What its answer takes."""
        if self.recording is not None:
            return self.recording.num_bytes
        return len(self._outcome.body) if isinstance(self._outcome, Answer) else 0


class Timer(Protocol):
    """A call that is due later."""

    def cancel(self) -> None:
        """Have it not happen."""


def call_later(seconds: float, callback: Callable[[], None]) -> Timer:
    """Have the running event loop call."""
    return asyncio.get_running_loop().call_later(seconds, callback)


class Runs:
    """The keyed requests that run or are kept, by their scope."""

    def __init__(
        self,
        grace_seconds: float,
        *,
        call_later: Callable[[float, Callable[[], None]], Timer] = call_later,
        max_kept: int = MAX_KEPT_RUNS,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._grace_seconds = grace_seconds
        self._call_later = call_later
        self._max_kept = max_kept
        self._max_kept_bytes = max_kept_bytes
        self._runs: OrderedDict[bytes, Run] = OrderedDict()
        self._tasks: dict[Run, asyncio.Task[Answer | None]] = {}
        self._timers: dict[Run, Timer] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, scope: bytes, body_digest: bytes) -> Run | None:
        """Look for a run; raises ValidationError if the key was used for another body."""
        run = self._runs.get(scope)
        if run is None:
            return None
        if run.body_digest != body_digest:
            raise ValidationError(f"`{KEY_HEADER}` has been used for a request with another body")
        self._runs.move_to_end(scope)
        return run

    def start(
        self,
        scope: bytes,
        body_digest: bytes,
        work: Callable[[Run], Coroutine[None, None, Answer | None]],
    ) -> Run:
        """Begin what `find` has not found; `work` records a stream, or returns an answer in one piece."""
        run = self._runs[scope] = Run(body_digest)
        self._tasks[run] = task = asyncio.create_task(work(run))
        # A task that is cancelled before its first step runs no `finally` of its own.
        task.add_done_callback(partial(self._end, scope, run))
        return run

    @contextmanager
    def reading(self, scope: bytes, run: Run) -> Iterator[None]:
        """Keep a run alive for the length of the block."""
        run.num_readers += 1
        if not run.ended:
            self._stop_timer(run)
        try:
            yield
        finally:
            run.num_readers -= 1
            if not run.num_readers:
                self._left(scope, run)

    def drain(self) -> None:
        """End what nobody reads, from now on at once: who comes back will find another server."""
        self._grace_seconds = 0.0
        for scope, run in tuple(self._runs.items()):
            if not run.num_readers:
                self._forget(scope, run)

    async def close(self) -> None:
        """End everything."""
        tasks = tuple(self._tasks.values())
        for scope, run in tuple(self._runs.items()):
            self._forget(scope, run)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _left(self, scope: bytes, run: Run) -> None:
        """Take note that nobody reads it any more."""
        if not self._grace_seconds:
            self._forget(scope, run)
        elif not run.ended:
            self._forget_later(scope, run)

    def _end(self, scope: bytes, run: Run, task: asyncio.Task[Answer | None]) -> None:
        del self._tasks[run]
        self._stop_timer(run)
        error = ShuttingDown() if task.cancelled() else task.exception()
        if error is None:
            run.finish(task.result())
        else:
            if isinstance(error, Exception) and not isinstance(error, RouterError):
                # With nobody left to read it, this is the only place that hears of it.
                log.error("keyed request failed", exc_info=error)
            run.finish(error if isinstance(error, Exception) else ShuttingDown())
        if self._runs.get(scope) is not run:
            return
        if not run.is_worth_keeping or not (self._grace_seconds or run.num_readers):
            self._forget(scope, run)
        elif self._grace_seconds:
            self._forget_later(scope, run)
            self._bound()

    def _bound(self) -> None:
        """Forget ended runs until the others are few and small enough."""
        ended = [(scope, run) for scope, run in self._runs.items() if run.ended]
        num_bytes = sum(run.num_bytes for _, run in ended)
        for count, (scope, run) in zip(range(len(ended), 0, -1), ended, strict=True):
            if count <= self._max_kept and num_bytes <= self._max_kept_bytes:
                return
            num_bytes -= run.num_bytes
            self._forget(scope, run)

    def _forget(self, scope: bytes, run: Run) -> None:
        """Let it go, and abort it if it still runs; who reads it reads on."""
        self._stop_timer(run)
        if self._runs.get(scope) is run:
            del self._runs[scope]
        if (task := self._tasks.get(run)) is not None:
            task.cancel()

    def _forget_later(self, scope: bytes, run: Run) -> None:
        self._timers[run] = self._call_later(self._grace_seconds, partial(self._forget, scope, run))

    def _stop_timer(self, run: Run) -> None:
        if (timer := self._timers.pop(run, None)) is not None:
            timer.cancel()
