"""The prompts and decodes of a step: prompts in chunks together with decodes, the short ones before the long ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from millrace_router.prediction.cost import FIRST_PROMPT_TOKENS, CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler import prefill_order
from millrace_router.scheduler.admission import Admission
from millrace_router.scheduler.block_manager import BlockManager, grow
from millrace_router.scheduler.multi_token import MultiTokenRows
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan


class PromptBudget:
    """The prompt tokens that fit into a step, also by seconds: a token costs more the more positions it attends to."""

    def __init__(
        self, tokens: int, seconds: float = math.inf, cost: CostModel | None = None
    ) -> None:
        """Without `cost` only tokens count."""
        self.tokens = tokens
        self.spent = 0.0
        """Seconds spent."""
        self.seconds = seconds
        """Seconds left."""
        self._cost = cost

    def share(self, part: float) -> PromptBudget:
        return PromptBudget(int(self.tokens * part), self.seconds * part, self._cost)

    def fitting(self, start: int = 0) -> int:
        """Return tokens of a prompt that fit from position `start` on."""
        if self._cost is None or self.tokens <= 0:
            return max(0, self.tokens)
        return self._cost.prompt_tokens_within(self.seconds, start=start, most=self.tokens)

    def spend(self, num_tokens: int, *, start: int) -> None:
        """Take away `num_tokens` of a prompt from position `start` on."""
        self.tokens -= num_tokens
        if self._cost is not None:
            seconds = self._cost.prompt_seconds(num_tokens, start=start)
            self.seconds -= seconds
            self.spent += seconds


class ChunkedPrefill:
    """Admits requests, and divides each step between prompts and decodes.

    A step decodes every row that can, and spends the rest of its budget on prompts, in order of arrival. With
    `shortest_first`, short prompts overtake long ones within a quota (`prefill_order`).
    """

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
        self._pending: list[Row] = []
        """Rows whose prompts this plan may compute."""
        self._has_deferred = False
        """Whether the last step with prompts left out the oldest one."""

    def plan(self, waiting: RequestQueue, plan: StepPlan) -> None:
        """Add prompts and decodes to `plan`."""
        self._plan_decodes(plan)
        num_running, self._pending = len(self._rows), self._unfinished()
        if not (self._pending or len(waiting) or self._admission.num_paused):
            return
        budget = self._prompt_budget(plan)
        quota, defers = self._quota(budget, has_decodes=bool(plan.decodes))
        # Decodes may take the whole budget, but prompts must go on.
        least = self._least_chunk if self._pending or budget.tokens >= self._least_chunk else 0
        while least or budget.fitting() > 0:
            row = self._next_prompt(waiting, plan)
            if row is None:
                break
            self._overtake(row, quota, budget, waiting, plan)
            chunk = self._least_chunk
            if plan.load.extra_positions:
                # Those left room for one least chunk, of which overtaking prompts have taken some.
                chunk = max(1, min(chunk, budget.tokens))
            least = min(least, chunk)
            start = row.num_prompt_planned
            # The cost model may leave no token so far into a prompt.
            most = max(least, budget.fitting(start), 1)
            if 0.0 < quota.spent <= defers and row.num_prompt_left > most:
                most, self._has_deferred = chunk, True
            budget.spend(self._chunk(row, most, plan, exceeds=True), start=start)
            least = 0
            if row.num_prompt_left:
                break
        if plan.admitted and num_running:
            plan.concat_reason = "chunking"

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

    def _quota(self, budget: PromptBudget, *, has_decodes: bool) -> tuple[PromptBudget, float]:
        """The part of `budget` for overtaking prompts, and the seconds up to which they leave out the oldest one."""
        if not self.budgets.shortest_first:
            return PromptBudget(0), 0.0
        had_deferred, self._has_deferred = self._has_deferred, False
        if had_deferred:
            return budget.share(prefill_order.SHARE_AFTER_DEFERRAL), 0.0
        defers = prefill_order.DEFERRAL_SHARE * budget.seconds if has_decodes else 0.0
        return budget.share(prefill_order.OVERTAKING_SHARE), defers if defers < math.inf else 0.0

    def _unfinished(self) -> list[Row]:
        """Rows with a part of their prompt left, the most senior first."""
        rows = [row for row in self._rows.values() if not row.num_tokens_planned]
        return sorted(rows, key=lambda row: row.seniority)

    @property
    def has_prompts(self) -> bool:
        """Whether a row's prompt lacks tokens."""
        return bool(self._left())

    def _left(self) -> list[Row]:
        """Return the rows whose prompt lacks tokens by now."""
        self._pending = [row for row in self._pending if row.num_prompt_left]
        return self._pending

    def _next_prompt(self, waiting: RequestQueue, plan: StepPlan) -> Row | None:
        """Return the row whose prompt is next in order of arrival; it may be admitted for that."""
        pending = self._left()
        for row in pending:
            if not row.is_early:
                return row
        early = min(pending, key=lambda row: row.entry.queued_at, default=None)
        if not self._must_readmit() and self._admission.precedes(waiting, early):
            admitted = self._admission.admit(waiting, self._rows.values())
            if admitted is not None:
                return self._join(admitted, plan)
        if early is not None:
            early.is_early = False
        return early

    def _overtake(
        self,
        oldest: Row,
        quota: PromptBudget,
        budget: PromptBudget,
        waiting: RequestQueue,
        plan: StepPlan,
    ) -> None:
        """Plan prompts shorter than the prompt of `oldest`, the shortest first, and take them from both budgets."""
        longest = prefill_order.longest_overtaking(oldest.num_prompt_left)
        early = [row for row in self._left() if row.is_early]
        early.sort(key=lambda row: row.num_prompt_left, reverse=True)
        # One token at least is for the oldest.
        while (left := min(quota.fitting(), budget.fitting(), budget.tokens - 1)) > 0:
            most = min(longest, early[-1].num_prompt_left - 1) if early else longest
            may_be_cut = len(early) < prefill_order.MAX_EARLY
            row = self._admit_early(waiting, plan, most if may_be_cut else min(most, left))
            if row is None:
                if not early:
                    return
                row = early.pop()
            start = row.num_prompt_planned
            most = min(quota.fitting(start), budget.fitting(start), budget.tokens - 1)
            num_tokens = self._chunk(row, max(most, 1), plan)
            quota.spend(num_tokens, start=start)
            budget.spend(num_tokens, start=start)

    def _admit_early(self, waiting: RequestQueue, plan: StepPlan, longest: int) -> Row | None:
        """Admit a waiting request that lacks at most `longest` prompt tokens; None if there is none that may join."""
        if not len(waiting) or self._admission.num_paused or self._must_readmit():
            return None
        num_left, request = min(self._candidates(waiting), key=lambda each: each[0])
        if num_left > longest:
            return None
        admitted = self._admission.admit(waiting, self._rows.values(), early=request)
        if admitted is None:
            return None
        row = self._join(admitted, plan)
        row.is_early = True
        return row

    def _candidates(self, waiting: RequestQueue) -> Iterator[tuple[int, SchedulableRequest]]:
        """Requests that may join early, each with the tokens to compute: the head, and the shortest."""
        head, shortest = waiting.head(), waiting.shortest()
        if head is not None:
            yield head.num_inputs - self._admission.num_cached(head), head
        if shortest is not None and shortest is not head:
            yield shortest.num_inputs, shortest

    def _prompt_budget(self, plan: StepPlan) -> PromptBudget:
        """Return the prompts that fit in addition to the decodes, also by the target latency."""
        load, cost = plan.load, self._cost
        tokens = self.budgets.max_batch_prefill_tokens - load.decodes - load.extra_positions
        if cost is None:
            return PromptBudget(tokens)
        if not cost.is_known:
            return PromptBudget(min(tokens, FIRST_PROMPT_TOKENS))
        if load.decodes:
            load = self._multi_token.expected_load(load)
        seconds = cost.seconds_for_prompts(self._max_step_seconds(load), load)
        if self.budgets.shortest_first and load.decodes:
            # Overtaking prompts go on even where the decodes take longer than the target.
            seconds = max(seconds, cost.prompt_seconds(2 * self._least_chunk, start=0))
        return PromptBudget(tokens, seconds, cost)

    def _max_step_seconds(self, load: StepLoad) -> float:
        """Return seconds that prompts may make the step last, which has `load` without them."""
        assert self._cost is not None
        plain, beside = self._cost.seconds(load), self._cost.seconds_beside_prompts(load)
        assert plain is not None
        assert beside is not None
        target = self.budgets.target_inter_token_latency
        return prefill_order.max_step_seconds(plain, beside, load.decodes, target)

    def _must_readmit(self) -> bool:
        """Return whether preempted rows come first, once their steps in flight are answered."""
        preempted = self._preempted.values()
        return any(not (row.has_yielded or row.entry.closed) for row in preempted)

    def _join(self, admitted: tuple[Row, list[int]], plan: StepPlan) -> Row:
        row, cached = admitted
        self._rows[row.slot] = row
        if row.is_multi_token:
            self._multi_token.slots.add(row.slot)
        plan.admitted.append(row)
        plan.grown.extend((row.slot, block) for block in cached)
        self._pending.append(row)
        return row

    def _chunk(self, row: Row, budget: int, plan: StepPlan, *, exceeds: bool = False) -> int:
        """Plan up to `budget` input tokens of `row`; return how many.

        With `exceeds` it goes on to the end of what may not be cut, if it begins there.
        """
        num_tokens, start = min(row.num_prompt_left, budget), row.num_prompt_planned
        room = row.num_prompt_left
        if self._blocks.windows:
            room = min(room, self._blocks.window_room(row.slot) - start)
            num_tokens = min(num_tokens, room)
        if (images := self._admission.images) is not None:
            most = room if exceeds else num_tokens
            num_tokens = _without_cut(images.uncut(row.entry), start, num_tokens, most)
        if num_tokens <= 0:
            return 0
        before = _take_chunk(plan, row) if start > row.num_cached else 0
        row.num_prompt_planned = row.num_kv_tokens = start + num_tokens
        if row.num_prompt_left == 0:
            row.num_tokens_planned = 1
            if row.image_rows and self._admission.images is not None:
                self._admission.images.release(row.entry)
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


def _without_cut(uncut: Iterable[tuple[int, int]], start: int, num_tokens: int, most: int) -> int:
    """Return up to `num_tokens` of a prompt from `start` on that end inside of none of the parts `uncut`.

    They go on to the end of a part that `start` is in, if these are up to `most`; else there are none.
    """
    for position, end in uncut:
        if position < start + num_tokens < end:
            if position > start:
                return position - start
            return end - start if end - start <= most else 0
    return num_tokens
