"""The way to the shards and back to them: epochs that last until something fails, and what is done about it then."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from millrace_router.errors import RouterError, ShardsGone
from millrace_router.prediction.cost import CostModel
from millrace_router.recovery.hang_detector import HangDetector, Oldest, StepTimer
from millrace_router.recovery.interrupt import Interrupt
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.recovery.shard_status import ShardStatus, Timeouts
from millrace_router.shards.errors import ShardChanged, ShardError, ShardHung, ShardLost, StepFailed
from millrace_router.shards.step_channel import StepChannel
from millrace_router.telemetry.metrics import Metrics

REOPEN_SECONDS = 0.2

log = structlog.get_logger(__name__)


class EpochManager:
    """Opens epochs, notices that one has failed, and has the launcher restart what does not come back by itself."""

    def __init__(
        self,
        shards: StepChannel,
        supervisor: LauncherChannel,
        patience: Timeouts,
        cost: CostModel,
        metrics: Metrics,
        *,
        oldest: Callable[[], Oldest | None],
    ) -> None:
        """`oldest` tells of the step that the shards are at."""
        self.recovery = ShardStatus()
        self.interrupt = Interrupt()
        """What the scheduling loop waits in; triggered by whatever is noticed from outside of it."""
        self._shards = shards
        self._supervisor = supervisor
        self._patience = patience
        self._metrics = metrics
        self._has_served = False
        self._has_computed = False
        self._restart_is_planned = False
        self._sentry = HangDetector(
            StepTimer(patience.step_seconds, cost),
            oldest=oldest,
            is_idle=lambda: self._has_served and oldest() is None,
            ask=shards.group.health,
            alarm=self.interrupt.trigger,
        )
        supervisor.on_restarting = self._on_restarting
        supervisor.on_gave_up = self._on_gave_up

    @property
    def refusal(self) -> RouterError | None:
        """Why it is in vain to wait for the shards, if it is."""
        if self.recovery.is_overdue(time.monotonic(), self._patience.recovery_seconds):
            return ShardsGone(self.recovery.reason)
        return None

    async def watch(self) -> None:
        """Look after the shards, until cancelled."""
        await self._sentry.run()

    async def open(self, meanwhile: Callable[[RouterError | None], None]) -> None:
        """Begin an epoch, however long that takes.

        `meanwhile` is called now and then, with an error once it is in vain to wait.
        """
        self._has_served = self._has_computed = False
        while True:
            try:
                async with self.interrupt:
                    await self._shards.open()
            except ShardError as error:
                if str(error) != self.recovery.reason:
                    log.warning("cannot open a stream to the shards", error=str(error))
                self._begin(str(error))
                if isinstance(error, (ShardHung, ShardChanged)):
                    self._supervisor.restart_shards(str(error))
            else:
                self._restart_is_planned = False
                return
            meanwhile(self.refusal)
            await asyncio.sleep(REOPEN_SECONDS)

    def failed(self, error: ShardError) -> str:
        """The epoch is over; the kind of failure, as `millrace_recoveries_total` has it."""
        self._has_served = False
        self._begin(str(error))
        kind = self._kind_of(error)
        self._shards.report_failure(kind, error)
        return kind

    def restart(self, kind: str, error: ShardError, *, num_suspects: int) -> None:
        """Have the shards restarted if they will not serve again as they are."""
        if num_suspects:
            self._supervisor.suspect(num_suspects)
        # After a failure of one rank the others may wait for it in a collective.
        is_stuck = kind in {"failed", "out_of_memory"} and len(self._shards.group) > 1
        if kind == "hung" or is_stuck:
            self._supervisor.restart_shards(str(error))

    def served(self, *, computed: bool) -> None:
        """The shards do their work: they have computed something, or there is nothing to compute."""
        if computed and not self._has_computed:
            self._has_computed = True
            self._supervisor.progressed()
        if self._has_served:
            return
        self._has_served = True
        seconds = self.recovery.end(time.monotonic())
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

    def _begin(self, reason: str) -> None:
        self.recovery.begin(reason, time.monotonic())
        self._metrics.recovering.set(1)

    def _on_restarting(self, is_planned: bool, reason: str) -> None:  # noqa: FBT001
        self._restart_is_planned = is_planned
        self._begin(reason)
        # They may be back before the loop would notice that they were gone.
        self.interrupt.trigger(ShardLost(reason))

    def _on_gave_up(self, reason: str) -> None:
        self.recovery.give_up(reason, time.monotonic())
        self._metrics.recovering.set(1)
        self.interrupt.trigger(ShardLost(reason))
