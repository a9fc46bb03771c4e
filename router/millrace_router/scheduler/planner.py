"""What the next step computes. Pure decisions over entries, slots and blocks; no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from itertools import chain, repeat

from millrace_router.prediction.cost import CostModel
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.admission import Admission
from millrace_router.scheduler.block_manager import BlockManager, advance
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.draft_length import LengthPolicy, Longest
from millrace_router.scheduler.multi_token import MultiTokenRows, Progress, grow
from millrace_router.scheduler.preemption import row_to_yield, rows_to_preempt
from millrace_router.scheduler.row import Row
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.scheduler.tenants import RequestQueue


class Planner:
    """Decides chunks, decodes, preemption and drops, and with `Admission` who joins; owns rows and blocks.

    A step decodes every row that can, then spends what is left of the prefill budget on prompts: first those
    already admitted, the most senior first, then new ones while slots and blocks last.

    Rows grow block by block. When blocks run short the most junior row is preempted: it is dropped, its tokens in
    flight still count, and it is admitted again as a prompt of everything so far. So the most senior row always
    goes on. A slot and its blocks are reused only once every step that named them is answered.
    """

    def __init__(
        self,
        budgets: Budgets,
        blocks: BlockManager,
        cost: CostModel | None = None,
        guesses: LengthPolicy | None = None,
    ) -> None:
        """Where the shards can guess, `guesses` says how many tokens ahead; without it as many as they can."""
        if guesses is None and budgets.speculate:
            guesses = Longest(budgets.speculate)
        self.budgets = budgets
        self.blocks = blocks
        self.rows: dict[int, Row] = {}
        self._cost = cost
        self._allowances = MultiTokenRows(blocks, guesses)
        self._flexible: set[int] = set()
        """Slots of flexible rows."""
        self._admission = Admission(budgets, blocks)
        self._preempted: dict[int, Row] = {}
        self._yielded: list[Row] = []
        """Rows that yielded to another tenant, on their way back into the queue."""
        self._to_drop: list[Row] = []
        self._retired: deque[tuple[int, int]] = deque()
        self._least_chunk = min(blocks.block_size, budgets.max_batch_prefill_tokens)
        self._decodes_since_prefill = 0
        self._owes_decode = False

    @property
    def num_paused(self) -> int:
        """Preempted entries, to be admitted again."""
        return len(self._preempted) + len(self._yielded) + self._admission.num_paused

    @property
    def num_paused_tokens(self) -> int:
        """Tokens of those so far, which are to be computed again or found cached."""
        tokens = sum(row.entry.num_inputs for row in self._preempted.values())
        return tokens + self._admission.num_paused_tokens

    @property
    def running(self) -> list[Row]:
        """Rows that a step in flight may name, those preempted since included."""
        return [*self.rows.values(), *self._preempted.values()]

    def num_cached(self, entry: SchedulableRequest) -> int:
        """Input tokens of `entry` that are cached now."""
        return self._admission.num_cached(entry)

    def surrender(self) -> list[tuple[int, SchedulableRequest]]:
        """Give up, and return, every entry that was admitted and is still read, with its seniority, in that order."""
        rows = [*self.running, *self._yielded]
        entries = [(row.seniority, row.entry) for row in rows] + self._admission.surrender()
        self.rows.clear()
        self._flexible.clear()
        self._preempted.clear()
        self._yielded.clear()
        return sorted((e for e in entries if not e[1].closed), key=lambda e: e[0])

    def succeed(self, other: Planner, entries: Iterable[tuple[int, SchedulableRequest]]) -> None:
        """Take the place of `other`, some of whose surrendered `entries` are to be admitted here, by replay."""
        self._admission.succeed(other._admission)
        self.readmit(entries)

    def readmit(self, entries: Iterable[tuple[int, SchedulableRequest]]) -> None:
        """Admit entries that were admitted before, each with its seniority, by replay."""
        for seniority, entry in entries:
            self._admission.readmit(seniority, entry)

    def limit(self, budgets: Budgets) -> None:
        """Plan within `budgets` from now on; there are as many slots as before."""
        self.budgets = budgets
        self._admission.limit(budgets)

    def row(self, slot: int) -> Row | None:
        """The row in `slot` whose tokens count: one that runs, or was preempted with steps in flight."""
        return self.rows.get(slot) or self._preempted.get(slot)

    def drop(self, row: Row) -> None:
        """Take `row` out of the batch for good; the shards hear of it with the next step."""
        if self.rows.get(row.slot) is row:
            del self.rows[row.slot]
            self._flexible.discard(row.slot)
            self._to_drop.append(row)
        elif self._preempted.get(row.slot) is row:
            del self._preempted[row.slot]

    def computed(
        self,
        plan: StepPlan,
        failed_slots: Container[int] = (),
        *,
        counts: Iterable[tuple[int, int]] = (),
        computed: Iterable[tuple[int, int, int]] = (),
    ) -> Progress | None:
        """Take note that `plan` has run, before its tokens are delivered: full blocks may be shared from now on.

        Of rows in `failed_slots`, whose values are not finite, nothing is shared any more. `counts` and `computed`,
        as in `wire.StepResult`, tell of flexible rows; what became of those is returned, None where there are none.

        Raises:
            ValueError: the answer contradicts the plan.

        """
        progress: Progress | None = None
        advances: Iterator[int] = repeat(1)
        if plan.flexible:
            progress = self._allowances.settle(
                plan, self.row, counts=counts, computed=computed, failed_slots=failed_slots
            )
            advances = iter(progress.advances) if progress.advances else advances
        filled = chain(plan.chunks, zip(plan.decodes, advances, strict=False))
        advance(filled, (self.rows, self._preempted), self.blocks, failed_slots)
        return progress

    def paid(self, progress: Progress, seconds: float) -> None:
        """Take note of what the step that made `progress` has taken."""
        self._allowances.paid(progress, seconds)

    def answered(self, number: int) -> None:
        """Reuse what no step after `number` can still name."""
        while self._retired and self._retired[0][0] <= number:
            _, slot = self._retired.popleft()
            self.blocks.release(slot)
            self._admission.free(slot)
            row = self._preempted.pop(slot, None)
            if row is not None and row.has_yielded:
                self._yielded.append(row)
            elif row is not None:
                self._admission.resume(row)

    @property
    def only_decodes(self) -> bool:
        """Whether all rows have got their first token, none is leaving, and none was preempted or is flexible."""
        leaving = self._to_drop or self._retired or self.num_paused or self._flexible
        return not leaving and all(row.num_tokens_planned for row in self.rows.values())

    def lacks_room(self, waiting: RequestQueue) -> bool:
        """Whether the head of the queue finds no slot, or too few blocks, as long as nobody leaves."""
        return self._admission.lacks_room(waiting, self.rows.values())

    def decode_on(self, *, num_planned: int, num_computed: int) -> None:
        """Take note of so many steps at once that each decoded every row, as `plan` and `computed` would one by one.

        For a simulator: there are to be blocks enough, nobody else may wait, and no row may end with them.
        """
        plan = StepPlan()
        for row in self.rows.values():
            row.num_tokens_planned += num_planned
            row.num_kv_tokens += num_planned
            if row.num_kv_tokens > row.num_kv_owned:
                self._grow(row, plan)
        filled = zip(self.rows, repeat(num_computed), strict=False)
        advance(filled, (self.rows, self._preempted), self.blocks, ())
        self._decodes_since_prefill += num_planned
        self._owes_decode = False

    def plan(self, waiting: RequestQueue, *, last_sent: int, last_answered: int) -> StepPlan | None:
        """The next step, or None when there is nothing to do. The plan counts as sent from here on."""
        plan = StepPlan()
        for row in [row for row in self.rows.values() if row.entry.closed]:
            self.drop(row)
        self._retire(plan, last_sent)
        self.answered(last_answered)
        for row in self._yielded:
            if not row.entry.closed:
                waiting.append(row.entry)
        self._yielded.clear()
        if not self.budgets.reserve_all:
            retired = (slot for _, slot in self._retired)
            for row in rows_to_preempt(self.rows.values(), self.blocks, retired):
                self._preempt(row, plan)
        if self.budgets.share_slots:
            self._preempt_for_tenants(waiting, plan)
        self._retire(plan, last_sent)
        if self.budgets.prefill_chunking:
            self._plan_decodes(plan)
            self._plan_chunks(waiting, plan)
        else:
            self._plan_prompts_or_decodes(waiting, plan)
        return plan if plan.dropped or plan.has_forward else None

    def _retire(self, plan: StepPlan, last_sent: int) -> None:
        if not self._to_drop:
            return
        plan.dropped.extend(row.slot for row in self._to_drop)
        self._retired.extend((last_sent, row.slot) for row in self._to_drop)
        self._to_drop.clear()

    def _preempt_for_tenants(self, waiting: RequestQueue, plan: StepPlan) -> None:
        """If the head of the queue finds no room, and its tenant has less of it than another, make that one yield."""
        if plan.num_preempted or not len(waiting):
            return
        is_full = len(self.rows) >= self.budgets.max_batch_size
        if self._retired and not (is_full and self._admission.has_free_slot):
            # What others have left behind may be room enough.
            return
        if not self.lacks_room(waiting):
            return
        head = waiting.head()
        victim = None if head is None else row_to_yield(self.rows.values(), head.tenant)
        if victim is not None:
            victim.has_yielded = True
            self._preempt(victim, plan)

    def _preempt(self, row: Row, plan: StepPlan) -> None:
        row.entry.num_preemptions += 1
        plan.num_preempted += 1
        self.drop(row)
        self._preempted[row.slot] = row

    def _plan_decodes(self, plan: StepPlan) -> None:
        if self._flexible:
            most = self.budgets.max_batch_prefill_tokens - self._least_chunk
            self._allowances.plan_decodes(self.rows.values(), plan, most=most)
            return
        context = 0
        for slot, row in self.rows.items():
            # Runs for every token there is, hence few calls.
            if 0 < row.num_tokens_planned < row.max_tokens:
                row.num_kv_tokens += 1
                if row.num_kv_tokens > row.num_kv_owned and not self._grow(row, plan):
                    row.num_kv_tokens -= 1
                    continue
                row.num_tokens_planned += 1
                context += row.num_kv_tokens
                plan.decodes.append(slot)
        plan.load.decodes = len(plan.decodes)
        plan.load.context = context

    def _plan_chunks(self, waiting: RequestQueue, plan: StepPlan) -> None:
        """Spend what the decodes leave of the budget on prompts."""
        unfinished = self._unfinished()
        if not (unfinished or len(waiting) or self._admission.num_paused):
            return
        budget = self._chunk_budget(plan, unfinished)
        for row in unfinished:
            # Decodes may take the whole budget, but what has been admitted must go on.
            least = self._least_chunk if row is unfinished[0] else 0
            budget -= self._chunk(row, max(budget, least), plan)
            if budget <= 0:
                return
        self._admit(waiting, plan, budget, reason="chunking")

    def _chunk_budget(self, plan: StepPlan, unfinished: list[Row]) -> int:
        target, load = self.budgets.target_inter_token_latency, plan.load
        budget = self.budgets.max_batch_prefill_tokens - load.decodes - load.extra_positions
        if target is None or self._cost is None or not load.decodes or budget < self._least_chunk:
            return budget
        load = self._allowances.expected(load)
        return self._cost.prefill_tokens_within(
            target,
            decodes=load.decodes,
            context=load.context,
            extra_positions=load.extra_positions,
            start=unfinished[0].num_prompt_planned if unfinished else 0,
            least=self._least_chunk,
            most=budget,
        )

    def _plan_prompts_or_decodes(self, waiting: RequestQueue, plan: StepPlan) -> None:
        """TGI's rule without chunking: a step computes whole prompts while decodes pause, or it decodes.

        Between two pauses there is at least one step of decodes.
        """
        num_running, unfinished = len(self.rows), self._unfinished()
        budget = self.blocks.count(self.budgets.max_batch_prefill_tokens) * self.blocks.block_size
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
            self._decodes_since_prefill += bool(plan.decodes)
            self._owes_decode = False

    def _admit_by_ratio(self, waiting: RequestQueue, plan: StepPlan, budget: int) -> None:
        budgets = self.budgets
        if not self.rows or self._decodes_since_prefill >= budgets.max_waiting_tokens:
            self._admit(waiting, plan, budget, reason="wait_exceeded", whole=True)
            return
        least = int(len(self.rows) * budgets.waiting_served_ratio)
        most = min(least, budgets.max_batch_size - len(self.rows))
        if self._admission.num_fitting(waiting, most=most, budget=budget) >= least:
            self._admit(waiting, plan, budget, reason="backpressure", whole=True)

    def _unfinished(self) -> list[Row]:
        rows = [row for row in self.rows.values() if not row.num_tokens_planned]
        return sorted(rows, key=lambda row: row.seniority)

    def _admit(
        self,
        waiting: RequestQueue,
        plan: StepPlan,
        budget: int,
        *,
        reason: str,
        whole: bool = False,
    ) -> None:
        """Admit entries and compute their prompts while the budget lasts; `whole` ones, or cut at its end."""
        preempted = self._preempted.values()
        if preempted and any(not (row.has_yielded or row.entry.closed) for row in preempted):
            # They come first, once their steps in flight are answered.
            return
        num_running = len(self.rows)
        while budget > 0:
            # What is longer than the whole budget, as a replay may be, goes alone.
            limit = budget if whole and plan.admitted else None
            admitted = self._admission.admit(waiting, self.rows.values(), whole=limit)
            if admitted is None:
                break
            row, cached = admitted
            self.rows[row.slot] = row
            if row.is_flexible:
                self._flexible.add(row.slot)
            plan.admitted.append(row)
            plan.grown.extend((row.slot, block) for block in cached)
            budget -= self._chunk(row, budget, plan)
        if plan.admitted and num_running:
            plan.concat_reason = reason

    def _chunk(self, row: Row, budget: int, plan: StepPlan) -> int:
        """Plan up to `budget` input tokens of `row`; how many it took."""
        num_tokens, start = min(row.num_prompt_left, budget), row.num_prompt_planned
        if num_tokens <= 0:
            return 0
        row.num_prompt_planned = row.num_kv_tokens = start + num_tokens
        if row.num_prompt_left == 0:
            row.num_tokens_planned = 1
            if row.is_flexible:
                plan.flexible.append(row.slot)
        self._grow(row, plan)
        plan.chunks.append((row.slot, num_tokens))
        plan.load.num_chunks += 1
        plan.load.prefill_tokens += num_tokens
        plan.load.prefill_pairs += num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return num_tokens

    def _grow(self, row: Row, plan: StepPlan) -> bool:
        return grow(row, self.blocks, plan)
