"""Opens epochs, detects their failures, and requests restarts from the launcher."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from millrace_router.errors import RouterError, ShardsGone
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery.group_restart import GroupRestart
from millrace_router.recovery.hang_detector import HangDetector, OldestStep, StepTimer
from millrace_router.recovery.interrupt import Interrupt
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.shard_status import ShardStatus
from millrace_router.shards.errors import ShardChanged, ShardError, ShardHung, ShardLost, StepFailed
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics

REOPEN_SECONDS = 0.2
"""Pause between attempts to open an epoch."""

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
        """A step of more than `step_seconds` counts as hung unless `cost` predicts such a duration.

        `oldest` returns the oldest step in flight.
        """
        self.interrupt = Interrupt()
        """The batcher waits inside this context; failures detected elsewhere interrupt it."""
        self.prepare: Callable[[], Awaitable[None]] | None = None
        """Awaited in each new epoch before its first step; a ShardError of it ends the epoch."""
        self._channel = channel
        self._launcher = launcher
        self._group_restart = GroupRestart(launcher, channel.group)
        self.status = status
        self._metrics = metrics
        self._serves = False
        """Whether the epoch has computed a step, or had none to compute."""
        self._has_computed = False
        """Whether a step of the epoch was computed."""
        self._restart_is_planned = False
        self._hang_detector = HangDetector(
            StepTimer(step_seconds, cost),
            oldest=oldest,
            is_idle=lambda: self._serves and oldest() is None,
            check=channel.group.health,
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
        return asyncio.create_task(self._hang_detector.run())

    async def open(self, meanwhile: Callable[[RouterError | None], None]) -> None:
        """Begin an epoch; retries until the shards are back.

        `meanwhile` is called after every failed attempt, with an error once the outage is overdue.
        """
        self._serves = self._has_computed = False
        told = {self.status.reason}
        while True:
            try:
                async with self.interrupt:
                    await self._group_restart.proceed()
                    await self._channel.open()
                    if self.prepare is not None:
                        await self.prepare()
            except ShardError as error:
                if str(error) not in told:
                    # Ranks that start fail one after another, each in its words.
                    told.add(str(error))
                    log.warning("cannot open a stream to the shards", error=str(error))
                self._begin_outage(str(error))
                if isinstance(error, (ShardHung, ShardChanged)):
                    self._group_restart.request(str(error))
            else:
                self._group_restart.finished()
                self._restart_is_planned = False
                return
            meanwhile(self.refusal)
            await asyncio.sleep(REOPEN_SECONDS)

    def fail(self, error: ShardError) -> str:
        """End the epoch; returns the kind of failure, the `reason` of `millrace_recoveries_total`."""
        self._serves = False
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
        """The shards computed a step."""
        if not self._has_computed:
            self._has_computed = True
            self._launcher.report_progress()
        self._end_outage()

    def idle(self) -> None:
        """The shards answered every step, and there is no further work."""
        self._end_outage()

    def _end_outage(self) -> None:
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
