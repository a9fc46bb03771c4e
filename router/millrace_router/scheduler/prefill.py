"""The prompts and decodes that a step computes, and TGI's older rule for them: whole prompts while decodes pause."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from millrace_router.prediction.cost import CostModel
from millrace_router.scheduler.admission import Admission
from millrace_router.scheduler.block_manager import BlockManager, grow
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.multi_token import MultiTokenRows
from millrace_router.scheduler.queue.tenants import RequestQueue
from millrace_router.scheduler.row import Row
from millrace_router.scheduler.step_plan import StepPlan


class PrefillPolicy(ABC):
    """Admits requests, and divides each step between prompts and decodes."""

    def __init__(
        self,
        budgets: Budgets,
        rows: dict[int, Row],
        preempted: Mapping[int, Row],
        *,
        blocks: BlockManager,
        admission: Admission,
        multi_token: MultiTokenRows,
        cost: CostModel | None,
    ) -> None:
        """`rows` and `preempted` are the planner's, by slot; admitted rows are added to `rows`."""
        self.budgets = budgets
        self._rows = rows
        self._preempted = preempted
        self._blocks = blocks
        self._admission = admission
        self._multi_token = multi_token
        self._cost = cost
        self._least_chunk = min(blocks.block_size, budgets.max_batch_prefill_tokens)

    @abstractmethod
    def plan(self, waiting: RequestQueue, plan: StepPlan) -> None:
        """Add prompts and decodes to `plan`."""

    @abstractmethod
    def decoded(self, num_steps: int) -> None:
        """Count steps that decoded every row and computed no prompt."""

    def _plan_decodes(self, plan: StepPlan) -> None:
        """Decode every row that can."""
        if self._multi_token.slots:
            most = self.budgets.max_batch_prefill_tokens - self._least_chunk
            self._multi_token.plan_decodes(self._rows.values(), plan, most=most)
            return
        context = 0
        for slot, row in self._rows.items():
            # Runs for every generated token, so it makes few calls.
            if 0 < row.num_tokens_planned < row.max_tokens:
                row.num_kv_tokens += 1
                if row.num_kv_tokens > row.num_kv_owned and not grow(row, self._blocks, plan.grown):
                    row.num_kv_tokens -= 1
                    continue
                row.num_tokens_planned += 1
                context += row.num_kv_tokens
                plan.decodes.append(slot)
        plan.load.decodes = len(plan.decodes)
        plan.load.context = context

    def _unfinished(self) -> list[Row]:
        """Rows with a part of their prompt left, the most senior first."""
        rows = [row for row in self._rows.values() if not row.num_tokens_planned]
        return sorted(rows, key=lambda row: row.seniority)

    def _must_readmit(self) -> bool:
        """Whether preempted rows come first, once their steps in flight are answered."""
        preempted = self._preempted.values()
        return any(not (row.has_yielded or row.entry.closed) for row in preempted)

    def _join(self, admitted: tuple[Row, list[int]], plan: StepPlan) -> Row:
        row, cached = admitted
        self._rows[row.slot] = row
        if row.is_multi_token:
            self._multi_token.slots.add(row.slot)
        plan.admitted.append(row)
        plan.grown.extend((row.slot, block) for block in cached)
        return row

    def _chunk(self, row: Row, budget: int, plan: StepPlan) -> int:
        """Plan up to `budget` input tokens of `row`; return how many."""
        num_tokens, start = min(row.num_prompt_left, budget), row.num_prompt_planned
        if num_tokens <= 0:
            return 0
        before = _take_chunk(plan, row) if start > row.num_cached else 0
        row.num_prompt_planned = row.num_kv_tokens = start + num_tokens
        if row.num_prompt_left == 0:
            row.num_tokens_planned = 1
            if row.is_multi_token:
                plan.multi_token_slots.append(row.slot)
        grow(row, self._blocks, plan.grown)
        plan.chunks.append((row.slot, before + num_tokens))
        plan.load.num_chunks += not before
        plan.load.prefill_tokens += num_tokens
        plan.load.prefill_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens


def _take_chunk(plan: StepPlan, row: Row) -> int:
    """Take the chunk of `row` out of `plan`, to be replaced by a longer one; return its tokens."""
    for index, (slot, num_tokens) in enumerate(plan.chunks):
        if slot == row.slot:
            del plan.chunks[index]
            return num_tokens
    return 0


class WholePrefill(PrefillPolicy):
    """TGI's rule without chunking: a step computes whole prompts while decodes pause, or it decodes.

    Between two pauses there is at least one step of decodes.
    """

    _decodes_since_prefill = 0
    _owes_decode = False

    def plan(self, waiting: RequestQueue, plan: StepPlan) -> None:
        """As `PrefillPolicy`."""
        num_running, unfinished = len(self._rows), self._unfinished()
        blocks = self._blocks
        budget = blocks.count(self.budgets.max_batch_prefill_tokens) * blocks.block_size
        if unfinished:
            # A replay may be longer than any prompt, and is computed in parts.
            self._chunk(unfinished[0], budget, plan)
        elif not (num_running and self._owes_decode):
            self._admit_by_ratio(waiting, plan, budget)
        if plan.chunks:
            self._decodes_since_prefill = 1
            self._owes_decode = num_running > 0
        else:
            self._plan_decodes(plan)
            self.decoded(int(bool(plan.decodes)))

    def decoded(self, num_steps: int) -> None:
        """As `PrefillPolicy`."""
        self._decodes_since_prefill += num_steps
        self._owes_decode = False

    def _admit(self, waiting: RequestQueue, plan: StepPlan, budget: int, *, reason: str) -> None:
        """Admit requests whose whole prompts fit into `budget`, and compute those."""
        if self._must_readmit():
            return
        num_running = len(self._rows)
        while budget > 0:
            # A prompt longer than the whole budget, as in a replay, is admitted alone.
            limit = budget if plan.admitted else None
            admitted = self._admission.admit(waiting, self._rows.values(), whole=limit)
            if admitted is None:
                break
            budget -= self._chunk(self._join(admitted, plan), budget, plan)
        if plan.admitted and num_running:
            plan.concat_reason = reason

    def _admit_by_ratio(self, waiting: RequestQueue, plan: StepPlan, budget: int) -> None:
        budgets, num_running = self.budgets, len(self._rows)
        if not num_running or self._decodes_since_prefill >= budgets.max_waiting_tokens:
            self._admit(waiting, plan, budget, reason="wait_exceeded")
            return
        least = int(num_running * budgets.waiting_served_ratio)
        most = min(least, budgets.max_batch_size - num_running)
        if self._admission.num_fitting(waiting, most=most, budget=budget) >= least:
            self._admit(waiting, plan, budget, reason="backpressure")
