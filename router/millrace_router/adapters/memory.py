"""Bounded memory of adapters: recent values, what the hub allowed, work in flight, turns, and failures of sources."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

from millrace_router.errors import AdapterUnavailable, RouterError

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Result = TypeVar("Result")

ACCESS_SECONDS = 60.0
"""A revoked token is refused after this time at the latest."""
MAX_GRANTS = 16_384
_SALT = secrets.token_bytes(16)

Holder = bytes
"""Hash of a token; empty without a token."""

MAX_REMEMBERED = 4096
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
FORGOTTEN_AFTER = 2.0
"""Waits after which a failure counts as the first one again."""


class Recent(Generic[Key, Value]):
    """Keeps at most `size` values for at most `seconds` each; the least recently used one goes first."""

    def __init__(
        self,
        size: int,
        *,
        seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._seconds = seconds
        self._clock = clock
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return the value of `key` if it is kept still."""
        entry = self._values.get(key)
        if entry is None:
            return None
        until, value = entry
        if until <= self._clock():
            del self._values[key]
            return None
        self._values.move_to_end(key)
        return value

    def put(self, key: Key, value: Value) -> None:
        self._values[key] = (self._clock() + self._seconds, value)
        self._values.move_to_end(key)
        while len(self._values) > self._size:
            self._values.popitem(last=False)

    def drop(self, key: Key) -> None:
        """Forget `key`, if it is kept."""
        self._values.pop(key, None)

    def kept(self) -> list[Key]:
        """Return the keys of all values that are kept still, the least recently used one first."""
        now = self._clock()
        return [key for key, (until, _) in self._values.items() if until > now]


def holder_of(token: str | None) -> Holder:
    """Hash a token with a salt of this process."""
    if token is None:
        return b""
    return blake2b(token.encode(errors="surrogatepass"), key=_SALT, digest_size=16).digest()


Grants = Recent[tuple[Holder, str, str | None], str]
"""By holder, repository and revision: the commit that the hub let the holder read within the last minute."""


def new_grants(clock: Callable[[], float] = time.monotonic) -> Grants:
    return Recent(MAX_GRANTS, seconds=ACCESS_SECONDS, clock=clock)


class SingleFlight(Generic[Result]):
    """Runs a piece of work once for all callers with the same key; it goes on when some of them leave.

    A refusal is remembered in `refusals`; the fetcher itself remembers outages.
    """

    def __init__(self, refusals: Recent[Hashable, RouterError]) -> None:
        self._refusals = refusals
        self._running: dict[Hashable, asyncio.Future[Result]] = {}

    async def run(self, key: Hashable, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of the work for `key`, or raise its error or the remembered one."""
        refusal = self._refusals.get(key)
        if refusal is not None:
            raise _copy(refusal)
        task = self._running.get(key)
        if task is None:
            task = asyncio.ensure_future(self._remembered(key, work))
            self._running[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    async def _remembered(self, key: Hashable, work: Callable[[], Awaitable[Result]]) -> Result:
        try:
            return await work()
        except RouterError as error:
            if not isinstance(error, AdapterUnavailable):
                self._refusals.put(key, _copy(error))
            raise

    def _ended(self, key: Hashable, task: asyncio.Future[Result]) -> None:
        del self._running[key]
        if not task.cancelled():
            # Nobody may be left to see it.
            task.exception()


def _copy(error: RouterError) -> RouterError:
    """Return the same error without its traceback, whose frames would be kept with it."""
    kind = type(error)
    copied = kind.__new__(kind, *error.args)
    copied.__dict__.update(error.__dict__)
    return copied


class FairTurns:
    """At most `total` turns at a time, of which a caller has at most `share`; callers that wait alternate.

    The caller "" is the server, whose turns are limited by `total` only.
    """

    def __init__(self, total: int, share: int) -> None:
        self._free = total
        self._share = share
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """The callers that wait; the first is next."""

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it."""
        if self._may_run(caller):
            self._start(caller)
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._end(caller)

    def _may_run(self, caller: str) -> bool:
        return self._free > 0 and (caller == "" or self._running[caller] < self._share)

    def _start(self, caller: str) -> None:
        self._free -= 1
        self._running[caller] += 1

    def _end(self, caller: str) -> None:
        self._free += 1
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        for other in filter(self._may_run, tuple(self._waiting)):
            futures = self._waiting.pop(other)
            self._start(other)
            futures.popleft().set_result(None)
            if futures:
                self._waiting[other] = futures

    async def _wait(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        futures = self._waiting.setdefault(caller, deque())
        futures.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._end(caller)
            else:
                futures.remove(turn)
                if not futures:
                    del self._waiting[caller]
            raise


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a source failed, and for how long it is not tried again."""

    reason: str
    seconds: float
    until: float


class BackOff:
    """The failures of sources: each failure doubles the wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: Recent[Hashable, Failure] = Recent(MAX_REMEMBERED, clock=clock)

    def rest(self, source: Hashable) -> tuple[str, float] | None:
        """Why the source failed, and the seconds until it may be tried again; None: now."""
        failure = self._failures.get(source)
        if failure is None or failure.until <= self._clock():
            return None
        return failure.reason, failure.until - self._clock()

    def fail(self, source: Hashable, reason: str, at_least: float | None) -> float:
        """Remember a failure, and return the seconds until the source may be tried again."""
        failure = self._failures.get(source)
        now, seconds = self._clock(), FIRST_SECONDS
        if failure is not None and now < failure.until + FORGOTTEN_AFTER * failure.seconds:
            seconds = min(2 * failure.seconds, LONGEST_SECONDS)
        if at_least is not None and math.isfinite(at_least):
            seconds = max(seconds, min(at_least, LONGEST_SECONDS))
        self._failures.put(source, Failure(reason, seconds, now + seconds))
        return seconds

    def succeed(self, source: Hashable) -> None:
        self._failures.drop(source)
