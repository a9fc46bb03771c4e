"""A batcher whose next plan is delayed until the test allows it."""

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
