"""A channel to a hash shard whose answers the test releases."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from millrace_router.engine.batcher import Batcher
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.step_load import StepLoad
from millrace_router.shards.errors import ShardError
from millrace_router.shards.step_result import StepResult
from millrace_testing.router.fake_router import DirectShards, new_batcher
from millrace_testing.shards.hash_shard import HashShard


class HeldShards(DirectShards):
    """Executes steps at once, and delivers one answer for each `release`."""

    def __init__(self, shard: HashShard, *, on_error: Callable[[], None]) -> None:
        """`on_error` is called for a failed step, before the router receives the error."""
        super().__init__(shard)
        self._on_error = on_error
        self._released = asyncio.Semaphore(0)
        self._changed = asyncio.Event()
        self._time_is_up = False

    @property
    def num_held(self) -> int:
        """The number of unread answers."""
        return len(self._answers)

    def release(self) -> None:
        """Deliver one more answer."""
        self._released.release()
        self._changed.set()

    def let_time_pass(self) -> None:
        """End the router's wait for an answer within a time."""
        self._time_is_up = True
        self._changed.set()

    async def open(self) -> None:
        self._released = asyncio.Semaphore(0)
        await super().open()

    async def answers_within(self, seconds: float) -> bool:
        assert seconds > 0.0
        assert self._answers, "nothing is in flight"
        self._time_is_up = False
        while self._released.locked() and not self._time_is_up:
            self._changed.clear()
            await self._changed.wait()
        return not self._released.locked()

    async def receive(self) -> StepResult:
        await self._released.acquire()
        try:
            return await super().receive()
        except ShardError:
            self._on_error()
            raise


NUM_TURNS = 6
"""Turns of the event loop after which the batcher surely waits for an answer or a request."""


class AlwaysOpen(LatePlanning):
    """Delays every plan until the test lets time pass, or the step before is answered."""

    seconds = math.inf

    def __init__(self) -> None:
        super().__init__(CostModel())
        self.learned: list[bool] = []
        """Whether the plan was delayed, for each step that was learned from."""

    def learn(self, spare_seconds: float, *, was_open: bool = True) -> None:
        self.learned.append(was_open)

    def open_seconds(self, load: StepLoad) -> float:
        return self.seconds


class NeverOpen(AlwaysOpen):
    """Plans every step at once."""

    seconds = 1e-9


def late_batcher(late: LatePlanning | None = None) -> tuple[Batcher, HeldShards, HashShard]:
    """A batcher that does not run yet, its channel and its shard."""
    shard = HashShard()
    shards = HeldShards(shard, on_error=lambda: None)
    return new_batcher(shards, shard, late=late or AlwaysOpen()), shards, shard


async def turns() -> None:
    """Let the batcher run until it waits."""
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


def admissions(shard: HashShard) -> list[int]:
    """The number of sequences that each step admits, without the message that opens the epoch."""
    return [len(step.prefill.change.admitted) for step in shard.steps[1:]]
