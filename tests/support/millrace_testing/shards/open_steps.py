"""A batcher whose next step stays undecided for as long as the test wants."""

from __future__ import annotations

import asyncio
import math

from millrace_router.engine.batcher import Batcher
from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.late_planning import LatePlanning
from millrace_router.prediction.step_load import StepLoad
from millrace_testing.router.fake_router import new_batcher
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.held_shards import HeldShards

NUM_TURNS = 6
"""Turns of the event loop after which the batcher waits for an answer or a request, whatever was done to it."""


class AlwaysOpen(LatePlanning):
    """Leaves every step open until the test lets time pass, or the one before is answered."""

    seconds = math.inf

    def __init__(self) -> None:
        super().__init__(CostModel())
        self.learned: list[bool] = []
        """Whether the step was open, of each that something was to be learned of."""

    def learn(self, spare_seconds: float, *, was_open: bool = True) -> None:
        self.learned.append(was_open)

    def open_seconds(self, load: StepLoad) -> float:
        return self.seconds


class NeverOpen(AlwaysOpen):
    """Has fallen so low that every step is planned at once."""

    seconds = 1e-9


def late_batcher(late: LatePlanning | None = None) -> tuple[Batcher, HeldShards, HashShard]:
    """One that does not run yet, and the shard whose answers come when the test says so."""
    shard = HashShard()
    shards = HeldShards(shard, on_error=lambda: None)
    return new_batcher(shards, shard, late=late or AlwaysOpen()), shards, shard


async def turns() -> None:
    """Let the batcher do all it can."""
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


def admissions(shard: HashShard) -> list[int]:
    """How many sequences each step admits; the first message only opens the epoch."""
    return [len(step.prefill.change.admitted) for step in shard.steps[1:]]
