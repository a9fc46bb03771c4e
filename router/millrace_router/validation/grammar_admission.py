"""Has the shards compile each grammar before a request with it is accepted, and remembers the answers.

A grammar may crash the shards. Every grammar that was being compiled at that moment is compiled again, one at a time
and with no other at work; a grammar that crashes the shards by itself is refused. So a client cannot crash the shards
with one grammar again and again, and no other grammar is refused for it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol
from weakref import WeakValueDictionary

from millrace_router.errors import Overloaded, QueueExpired, ShardsGone, ValidationError
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.request.request import Grammar
from millrace_router.shards.errors import ShardBusy, ShardError, ShardHung, ShardLost
from millrace_router.telemetry.metrics import Metrics

CHECK_SECONDS = 60.0
"""Limit of one call; the shards' own limit is shorter, and the hang detector finds hung shards sooner."""
REFUSED_SECONDS = 600.0
"""How long a refusal is remembered: a grammar that took too long on a busy machine may compile later."""
NUM_AT_ONCE = 16
"""Grammars that are compiled at once."""
MAX_WAITING = 64
"""Grammars that may wait to be compiled."""
MAX_REMEMBERED = 1024
MAX_REASON_CHARS = 1000
NUM_TRIES_ALONE = 2
RETRY_SECONDS = 0.2
"""Pause after the shards were lost, in which the batcher notices it."""
BREAKS = "it breaks the model server"
TOO_MANY = "Model is overloaded: too many grammars are to be compiled"
BUSY = "Model is overloaded: the grammar cannot be compiled now"


class Compiler(Protocol):
    """The shards."""

    async def compile_grammar(self, grammar: Grammar, /) -> str | None:
        """Compile `grammar`; returns the reason of a refusal, or None. Raises ShardError."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    reason: str | None
    """Reason of a refusal; None for an accepted grammar."""
    refused_until: float


class GrammarAdmission:
    """Has the shards compile a few grammars at a time while they serve."""

    def __init__(
        self,
        compiler: Compiler,
        status: ShardStatus,
        metrics: Metrics,
        *,
        check_seconds: float = CHECK_SECONDS,
    ) -> None:
        """Requests wait for a recovery of the shards as long as `status` allows."""
        self._compiler = compiler
        self._status = status
        self._check_seconds = check_seconds
        self._metrics = metrics
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._locks: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(NUM_AT_ONCE)
        self._turn_alone = asyncio.Lock()
        self._num_waiting = 0

    async def check(self, grammar: Grammar, *, wait_seconds: float | None = None) -> None:
        """Return if a request may have `grammar`; `wait_seconds` is the longest wait for the answer.

        Raises:
            ValidationError: the shards refuse the grammar; the message has the reason.
            Overloaded: too many grammars are waiting, or the compilation took too long.
            ShardsGone: the shards are down, and not expected back in time.

        """
        key = sha256(f"{grammar.kind}\0{grammar.source}".encode()).digest()
        verdict = self._recall(key)
        if verdict is None:
            try:
                async with asyncio.timeout(wait_seconds):
                    verdict = await self._decide(key, grammar)
            except TimeoutError:
                raise QueueExpired(retry_after_seconds=1.0) from None
        elif verdict.reason is None:
            await self._renew(grammar, wait_seconds)
        if verdict.reason is not None:
            raise ValidationError(f"grammar is not valid: {verdict.reason}")

    async def _renew(self, grammar: Grammar, wait_seconds: float | None) -> None:
        """Have the shards compile a known grammar that they may have dropped, so that no step waits for it.

        A grammar that the shards kept takes no time. A failure is ignored, because the grammar is known to be accepted.
        """
        with suppress(TimeoutError, ShardError, Overloaded):
            async with asyncio.timeout(wait_seconds):
                if self._status.since is None:
                    await self._compile(grammar)

    async def _decide(self, key: bytes, grammar: Grammar) -> _Verdict:
        """Ask the shards, or wait for the answer to the same question of another request."""
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:
            verdict = self._recall(key)
            if verdict is None:
                verdict = self._remember(key, await self._ask_and_count(grammar))
        return verdict

    async def _ask_and_count(self, grammar: Grammar) -> str | None:
        began, outcome = self._status.clock(), "unavailable"
        try:
            reason = await self._ask(grammar)
            outcome = "accepted" if reason is None else "refused"
            return reason
        finally:
            self._metrics.grammars.labels(outcome=outcome).inc()
            self._metrics.grammar_seconds.observe(self._status.clock() - began)

    async def _ask(self, grammar: Grammar) -> str | None:
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(TOO_MANY)
        self._num_waiting += 1
        try:
            await self._wait_for_shards()
            async with self._slots:
                with suppress(ShardLost, ShardHung):
                    return await self._compile(grammar)
            return await self._ask_alone(grammar)
        finally:
            self._num_waiting -= 1

    async def _ask_alone(self, grammar: Grammar) -> str | None:
        async with self._alone():
            for _ in range(NUM_TRIES_ALONE):
                await asyncio.sleep(RETRY_SECONDS)
                await self._wait_for_shards()
                with suppress(ShardLost, ShardHung):
                    return await self._compile(grammar)
        return BREAKS

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold every place for the length of the block."""
        async with self._turn_alone, AsyncExitStack() as held:
            for _ in range(NUM_AT_ONCE):
                await held.enter_async_context(self._slots)
            yield

    async def _wait_for_shards(self) -> None:
        """Wait until the shards serve; raises ShardsGone."""
        while self._status.since is not None:
            if self._status.is_overdue:
                raise ShardsGone(self._status.reason)
            await asyncio.sleep(RETRY_SECONDS)

    async def _compile(self, grammar: Grammar) -> str | None:
        """Compile `grammar`; returns the reason of a refusal, or None.

        Raises:
            ShardLost, ShardHung: the shards stopped serving meanwhile.
            Overloaded: the shards are busy, or the call took longer than the shards' own limit, which is not the
                grammar's fault.

        """
        try:
            async with asyncio.timeout(self._check_seconds):
                return await self._compiler.compile_grammar(grammar)
        except TimeoutError:
            if self._status.since is not None:
                raise ShardHung(self._status.reason) from None
            raise Overloaded(BUSY) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # A closed channel cancels its calls, but not the tasks that await them.
            raise ShardLost("the channel to the shard was closed") from None
        except (ShardLost, ShardHung):
            raise
        except ShardBusy:
            raise Overloaded(BUSY) from None
        except ShardError as error:
            return str(error)

    def _recall(self, key: bytes) -> _Verdict | None:
        verdict = self._verdicts.get(key)
        if verdict is None or (
            verdict.reason is not None and self._status.clock() >= verdict.refused_until
        ):
            return None
        self._verdicts.move_to_end(key)
        return verdict

    def _remember(self, key: bytes, reason: str | None) -> _Verdict:
        short = None if reason is None else reason[:MAX_REASON_CHARS]
        verdict = self._verdicts[key] = _Verdict(short, self._status.clock() + REFUSED_SECONDS)
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict
