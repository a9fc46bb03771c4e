"""Opens epochs, detects their failures, and requests restarts from the launcher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType

import structlog

from millrace_router.errors import RouterError, ShardsGone
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery.hang_detector import HangDetector, OldestStep, StepTimer
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.recovery_policy import RecoveryPolicy
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.shards.errors import ShardChanged, ShardError, ShardHung, ShardLost, StepFailed
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics


class GroupRestart:
    """Asks for one restart at a time.

    A launcher restarts its ranks itself. Other ranks are ended over the wire, so that their supervisors start new ones:
    all that belong to the group, since the ones that are left wait for a rank that is gone.
    """

    def __init__(self, launcher: LauncherChannel, group: ShardGroup) -> None:
        self._launcher = launcher
        self._group = group
        self._reason: str | None = None
        """Why ranks are being ended."""

    def request(self, reason: str) -> None:
        if self._is_supervised:
            self._launcher.restart_shards(reason)
        else:
            self._reason = reason

    def unreachable(self, reason: str) -> None:
        """Record that the group has been out of reach for long: its launcher may see it run, without its sockets."""
        if self._is_supervised:
            self._launcher.restart_shards(reason)

    def rank_lost(self, reason: str) -> None:
        """Record an unreachable rank: its launcher restarts all by itself, and a single rank needs no others."""
        if not self._is_supervised and len(self._group) > 1:
            self._reason = reason

    async def proceed(self) -> None:
        """End ranks that are left of a group that has to restart; raises ShardLost while there are any.

        Called before each attempt to begin an epoch, because a rank may be unreachable at first.
        """
        if self._reason is not None and await self._group.end(self._reason):
            raise ShardLost(f"the ranks restart: {self._reason}")

    def finished(self) -> None:
        """Record that the shards have begun an epoch."""
        self._reason = None

    @property
    def _is_supervised(self) -> bool:
        return self._launcher.is_open and self._group.is_local


class Interrupt:
    """An asynchronous context that `trigger` ends with an error. It can be entered repeatedly, but not nested.

    Without a trigger it costs about a microsecond, because no timer is set.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._limit: asyncio.Timeout | None = None

    def trigger(self, error: Exception) -> None:
        """End the context with `error`, or the next context as soon as it is entered. The first trigger counts."""
        if self._error is None:
            self._error = error
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time())

    def clear(self) -> None:
        """Forget a trigger that has not ended a context yet."""
        self._error = None

    async def __aenter__(self) -> None:
        if self._error is not None:
            raise self._take()
        self._limit = asyncio.timeout(None)
        await self._limit.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        limit, self._limit = self._limit, None
        assert limit is not None
        try:
            await limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise self._take() from None

    def _take(self) -> Exception:
        error, self._error = self._error, None
        assert error is not None
        return error


REOPEN_SECONDS = 0.2
"""Pause between attempts to open an epoch."""

KEEPING = frozenset({"out_of_memory"})
"""Kinds of failure after which KV is kept, where the shards still have it."""

log = structlog.get_logger(__name__)


class EpochManager:
    """Begins and ends epochs: an epoch lasts until a failure, and the next one begins when the shards are back."""

    def __init__(
        self,
        channel: StepChannel,
        launcher: LauncherChannel,
        status: ShardStatus,
        cost: CostModel,
        metrics: Metrics,
        *,
        oldest: Callable[[], OldestStep | None],
        step_seconds: float = 30.0,
    ) -> None:
        """A step counts as hung if nothing is computed for `step_seconds`, unless `cost` predicts a long one.

        `oldest` returns the oldest step in flight. Shards that are out of reach for `step_seconds`, although their
        launcher sees them running, are restarted.
        """
        self.interrupt = Interrupt()
        """The batcher waits inside this context; failures detected elsewhere interrupt it."""
        self.prepare: Callable[[], Awaitable[None]] | None = None
        """Awaited in each new epoch before its first step; a ShardError of it ends the epoch."""
        self._channel = channel
        channel.settle = self._settle_kv
        self._launcher = launcher
        self._group_restart = GroupRestart(launcher, channel.group)
        self._step_seconds = step_seconds
        self.status = status
        self._metrics = metrics
        self._serves = False
        """Whether the epoch has computed a step, or had none to compute."""
        self._has_computed = False
        self._restart_is_planned = False
        self.recovery: RecoveryPolicy | None = None
        """Knows what KV the next epoch keeps."""
        self._is_lost = False
        """Whether the last failure was that a shard was out of reach."""
        self._kv_stores: tuple[int, ...] = ()
        """`ShardGroup.kv_stores` when the last epoch began."""
        self._serving = asyncio.Event()
        """Set when the launcher reports that restarted shards serve, so that they are tried at once."""
        self._are_ending = False
        """Whether the launcher is about to end the shards, which accept a stream until then."""
        self._hang_detector = HangDetector(
            StepTimer(step_seconds, cost),
            oldest=oldest,
            is_idle=lambda: self._serves and oldest() is None,
            pulse=channel.group.pulse,
            report=self.interrupt.trigger,
        )

    @property
    def refusal(self) -> RouterError | None:
        """The error of requests that need not wait for the shards; None if they may wait."""
        return ShardsGone(self.status.reason) if self.status.is_overdue else None

    def watch(self) -> asyncio.Task[None]:
        """Follow the launcher's messages, and watch for hangs until the task is cancelled."""
        self._launcher.on_restarting = self._on_restarting
        self._launcher.on_gave_up = self._on_gave_up
        self._launcher.on_moved = self._on_moved
        self._launcher.on_serving = self._serving.set
        return asyncio.create_task(self._hang_detector.run())

    def may_keep_kv(self, kind: str) -> bool:
        """Whether a failure of this kind, as `fail` returns it, casts no doubt on the KV of answered steps.

        Only then is `RecoveryPolicy.next_epoch` called with `keep`. After a step that ran out of memory several ranks
        restart, because some may wait in a collective. A shard that is out of reach may have ended in any way: its
        launcher, which knows how, lets the next one begin without KV unless it was killed from outside. It may live,
        too, and another router may have written to its KV, which only a directory shows.
        """
        if kind == "lost":
            return self._is_lost and self._channel.group.has_kv_store
        return kind in KEEPING and len(self._channel.group) == 1

    async def open(self, meanwhile: Callable[[RouterError | None], None]) -> bool:
        """Begin an epoch; retries until the shards are back.

        `meanwhile` is called after every failed attempt, with an error once the outage is overdue.

        Returns whether every rank has the KV memory of the epoch before (`ShardGroup.kv_stores`), so that blocks hold
        what answered steps wrote. If not, the caller forgets the KV that it has kept.
        """
        self._serves = self._has_computed = False
        logged, last_restart = {self.status.reason}, time.monotonic()
        if self._are_ending:
            await self._wait_until_serving()
        while True:
            try:
                async with self.interrupt:
                    await self._group_restart.proceed()
                    await self._channel.open()
                    if self.prepare is not None:
                        await self.prepare()
            except ShardError as error:
                if str(error) not in logged:
                    # Ranks that start fail one after another, each in its words.
                    logged.add(str(error))
                    log.warning("cannot open a stream to the shards", error=str(error))
                self._begin_outage(str(error))
                if isinstance(error, (ShardHung, ShardChanged)):
                    if self.recovery is not None:  # What hangs may have written anywhere.
                        self.recovery.forget_kv()
                    self._group_restart.request(str(error))
                elif time.monotonic() - last_restart > self._step_seconds:
                    last_restart = time.monotonic()
                    self._group_restart.unreachable(str(error))
            else:
                self._group_restart.finished()
                self._restart_is_planned = False
                before, self._kv_stores = self._kv_stores, self._channel.group.kv_stores
                return self._kv_stores == before
            meanwhile(self.refusal)
            await self._wait_until_serving()

    async def _wait_until_serving(self) -> None:
        """Return once the launcher reports that the shards serve, or after `REOPEN_SECONDS`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REOPEN_SECONDS):
                await self._serving.wait()
                # Reports from before are of the shards that have ended.
                self.interrupt.clear()
        self._serving.clear()
        self._are_ending = False

    async def close(self) -> bool:
        """End the epoch for another router; returns whether its effect on KV can be seen afterwards."""
        self._serves = False
        self.interrupt.clear()
        await self._channel.close()
        return self._channel.group.has_kv_store

    async def _settle_kv(self) -> int:
        """Keep the KV of an earlier epoch if every rank has it; return the life of the ledger of blocks."""
        recovery, group = self.recovery, self._channel.group
        if recovery is None:
            return 0
        if recovery.keeps_kv and (stored := await group.stored_blocks()):
            if (reason := recovery.settle_kv(stored)) is None:
                self._kv_stores = group.kv_stores
            else:
                log.warning("the KV of the shards is dropped, and computed again", reason=reason)
                self._metrics.kv_stores_dropped.labels(reason=reason).inc()
        return recovery.life

    def fail(self, error: ShardError) -> str:
        """End the epoch; returns the kind of failure, the `reason` of `millrace_recoveries_total`."""
        self._serves = False
        self._is_lost = isinstance(error, ShardLost)
        self._begin_outage(str(error))
        kind = self._kind_of(error)
        self._channel.report_failure(kind, error)
        return kind

    def restart(self, kind: str, error: ShardError, *, num_suspects: int) -> None:
        """Request a restart if the shards cannot serve the next epoch as they are."""
        if num_suspects:
            self._launcher.report_suspects(num_suspects)
        # After one rank failed, the others may wait for it in a collective.
        is_stuck = kind in {"failed", "out_of_memory"} and len(self._channel.group) > 1
        if kind == "hung" or is_stuck:
            self._group_restart.request(str(error))
        elif kind == "lost":
            self._group_restart.rank_lost(str(error))

    def step_computed(self) -> None:
        if not self._has_computed:
            self._has_computed = True
            self._launcher.report_progress()
        self.end_outage()

    def end_outage(self) -> None:
        """Record that the shards serve: they have computed a step, or have none to compute."""
        if self._serves:
            return
        self._serves = True
        seconds = self.status.end_outage()
        if seconds is not None:
            log.info("the shards serve again", seconds=round(seconds, 3))
            self._metrics.recovering.set(0)
            self._metrics.recovery_seconds.observe(seconds)

    def _kind_of(self, error: ShardError) -> str:
        if isinstance(error, StepFailed):
            return "out_of_memory" if error.out_of_memory else "failed"
        if isinstance(error, ShardHung):
            return "hung"
        return "planned" if self._restart_is_planned else "lost"

    def _begin_outage(self, reason: str) -> None:
        self.status.begin_outage(reason)
        self._metrics.recovering.set(1)

    def _on_restarting(self, is_planned: bool, reason: str) -> None:  # noqa: FBT001
        self._restart_is_planned = is_planned
        self._are_ending = True
        self._serving.clear()
        self._begin_outage(reason)
        # The shards may be back before the batcher notices that their streams ended.
        self.interrupt.trigger(ShardLost(reason))

    def _on_gave_up(self, reason: str) -> None:
        self.status.give_up(reason)
        self._metrics.recovering.set(1)
        self.interrupt.trigger(ShardLost(reason))

    def _on_moved(self, addresses: tuple[str, ...]) -> None:
        self._channel.group.move(addresses)
        reason = f"the shards are at {', '.join(addresses)} now"
        self._begin_outage(reason)
        self.interrupt.trigger(ShardLost(reason))
