"""Static batching: the router's planner with one or two rules more, and the simulator with that planner."""

from __future__ import annotations

import sys
from typing import ClassVar

from bench.parts.simulation import TimedEngine
from millrace_router.prediction.cost import CostModel
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.draft_length import DraftPolicy
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_router.scheduler.queue import RequestQueue, WaitingQueue
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan

NOBODY = WaitingQueue()


class StaticPlanner(Planner):
    """A batch is filled from the waiting requests, and no request joins before all its rows have ended.

    A preempted request is still of its batch. Tenants do not share slots, and adapters do not make room.
    """

    def __init__(
        self,
        budgets: Budgets,
        blocks: BlockManager,
        cost: CostModel | None = None,
        drafts: DraftPolicy | None = None,
    ) -> None:
        super().__init__(budgets, blocks, cost, drafts)
        self._is_forming = True

    def plan(self, waiting: RequestQueue, *, last_sent: int, last_answered: int) -> StepPlan | None:
        """Plan a step that `waiting` requests join only while the batch forms."""
        if all(row.entry.closed for row in self.rows.values()):
            self._is_forming = True
        queue = waiting if self._is_forming else NOBODY
        plan = super().plan(queue, last_sent=last_sent, last_answered=last_answered)
        # A request may still join now, with the next budget, or with a block that is about to be free.
        if self.rows and (not len(waiting) or self.lacks_room(waiting)):
            self._is_forming = False
        return plan


class NaivePlanner(StaticPlanner):
    """Decodes a row that has ended on until the longest answer of its batch ends; such rows are padding.

    A multi-token row leaves, because a grammar has no token after the last.
    """

    def __init__(
        self,
        budgets: Budgets,
        blocks: BlockManager,
        cost: CostModel | None = None,
        drafts: DraftPolicy | None = None,
    ) -> None:
        super().__init__(budgets, blocks, cost, drafts)
        self.padding: set[int] = set()
        """Slots of rows that have ended."""

    def plan(self, waiting: RequestQueue, *, last_sent: int, last_answered: int) -> StepPlan | None:
        """Plan a step without padding that is as long as its batch, or the last of it."""
        is_over = all(slot in self.padding or row.entry.closed for slot, row in self.rows.items())
        for row in [self.rows[slot] for slot in self.padding]:
            if is_over or row.num_tokens_planned >= row.max_tokens:
                self.drop(row)
        return super().plan(waiting, last_sent=last_sent, last_answered=last_answered)

    def row(self, slot: int) -> Row | None:
        """The row in `slot` whose tokens count; tokens of padding do not."""
        return None if slot in self.padding else super().row(slot)

    def end(self, row: Row) -> None:
        """Turn `row` into padding."""
        if self.rows.get(row.slot) is not row or row.is_multi_token:
            self.drop(row)
            return
        self.padding.add(row.slot)
        longest = max(each.num_inputs + each.max_tokens for each in self.rows.values())
        row.max_tokens = longest - row.num_inputs
        # Blocks that run short are taken from it first.
        row.seniority = sys.maxsize
        # Its further blocks hold no tokens of the request, so they are not cached.
        row.num_entered = sys.maxsize

    def drop(self, row: Row) -> None:
        """Remove `row` for good."""
        if self.rows.get(row.slot) is row:
            self.padding.discard(row.slot)
        super().drop(row)

    def take_all(self) -> list[tuple[int, SchedulableRequest]]:
        """Remove and return every admitted request; padding is none."""
        for slot in self.padding:
            del self.rows[slot]
        self.padding.clear()
        return super().take_all()

    def _drop_closed(self) -> None:
        for row in [row for row in self.rows.values() if row.entry.closed]:
            if row.slot not in self.padding:
                self.drop(row)

    def _preempt(self, row: Row, plan: StepPlan) -> None:
        if row.slot in self.padding:
            self.drop(row)
        else:
            super()._preempt(row, plan)


class StaticEngine(TimedEngine):
    """A simulated server with static batching."""

    planner: ClassVar[type[Planner]] = StaticPlanner

    def _new_planner(self) -> Planner:
        deployment = self._deployment
        cache = PrefixCache() if deployment.prefix_caching == "on" else None
        blocks = BlockManager(deployment.num_blocks, deployment.block_size, cache)
        return self.planner(deployment.budgets, blocks, self._cost)


class NaiveEngine(StaticEngine):
    """A simulated server with naive static batching."""

    planner = NaivePlanner
