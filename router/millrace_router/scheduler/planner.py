"""The work of the next step. Pure decisions over requests, slots and blocks; no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator
from itertools import chain, repeat

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.admission import Admission
from millrace_router.scheduler.block_manager import BlockManager, advance
from millrace_router.scheduler.draft_length import DraftPolicy, FixedDraftLength
from millrace_router.scheduler.image_features import ImageFeatures
from millrace_router.scheduler.multi_token import MultiTokenRows, Progress
from millrace_router.scheduler.preemption import Expulsion, row_to_yield, rows_to_preempt
from millrace_router.scheduler.prefill import ChunkedPrefill
from millrace_router.scheduler.queue import RequestQueue
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan

MOST_STEPS_BEFORE_TILE = 4
"""Most steps with prompts that run before a waiting tile is encoded."""
ENCODER_SHARE = 0.5
"""Share of a step's time for the encoder. Its layers take up to 1.5 times the predicted time."""


class Planner:
    """Plans steps; owns rows and blocks.

    Requests join and leave at every step (iteration-level scheduling: Orca, OSDI 2022). `Admission` decides which one
    joins, and `ChunkedPrefill` divides a step between prompts and decodes: first the prompts of admitted rows, the most
    senior first, then new ones while slots and blocks last.

    Rows grow block by block. When blocks run short, the most junior row is preempted: it is dropped, its tokens in
    flight still count, and its request is admitted again with a prompt of all its tokens. So the most senior row
    always goes on. A slot and its blocks are reused only once every step that named them is answered.
    """

    def __init__(
        self,
        budgets: Budgets,
        blocks: BlockManager,
        cost: CostModel | None = None,
        drafts: DraftPolicy | None = None,
        images: ImageFeatures | None = None,
    ) -> None:
        """`drafts` chooses the number of draft tokens; without it there are always as many as possible.

        `images` is for a model that reads them.
        """
        if drafts is None and budgets.max_draft_tokens:
            drafts = FixedDraftLength(budgets.max_draft_tokens)
        self.budgets = budgets
        self.blocks = blocks
        self.rows: dict[int, Row] = {}
        """The running rows by slot."""
        self._preempted: dict[int, Row] = {}
        """Rows that were preempted and are in steps in flight, by slot."""
        self._yielded: list[Row] = []
        """Rows preempted for another tenant or adapter, whose requests go back into the queue."""
        self._to_drop: list[Row] = []
        self._retired: deque[tuple[int, int]] = deque()
        """(last step that may name it, slot)."""
        self.expulsion = Expulsion()
        self._multi_token = MultiTokenRows(blocks, drafts)
        self.images = images
        self._cost = cost
        self._steps_since_tile = MOST_STEPS_BEFORE_TILE
        """Steps since the last one that encoded a tile of a picture."""
        self._admission = Admission(budgets, blocks, images)
        self._prefill = ChunkedPrefill(
            budgets,
            self.rows,
            self._preempted,
            blocks=blocks,
            admission=self._admission,
            multi_token=self._multi_token,
            cost=cost,
        )

    @property
    def num_paused(self) -> int:
        """Preempted requests, which will be admitted again."""
        waiting = 0 if self.images is None else self.images.num_waiting
        return len(self._preempted) + len(self._yielded) + self._admission.num_paused + waiting

    @property
    def num_paused_tokens(self) -> int:
        """Prompt and generated tokens of preempted requests, which will be computed again or found in the cache."""
        tokens = sum(row.entry.num_inputs for row in self._preempted.values())
        if self.images is not None:
            tokens += self.images.num_waiting_tokens
        return tokens + self._admission.num_paused_tokens

    @property
    def running(self) -> list[Row]:
        """Rows that a step in flight may name, preempted ones included."""
        return [*self.rows.values(), *self._preempted.values()]

    def num_cached(self, request: SchedulableRequest) -> int:
        """Input tokens of `request` that are cached now."""
        return self._admission.num_cached(request)

    def park(self) -> None:
        """Take back the blocks of an ended epoch but those with computed positions, which their requests keep.

        A position counts as computed once its step was answered: later ones may hold anything. The last known token has
        to be computed in any case. A request that wants its prompt's log probabilities computes all of it again, and
        a preempted one gives its blocks back as it would have done. So does every request of a model with recurrent
        layers, whose state may be ahead of the answers: it goes on from the last copy of it, as over a cached prefix.
        """
        rows = () if self.blocks.states is not None else self.rows.values()
        for row in sorted(rows, key=lambda row: row.seniority):
            request = row.entry
            if not (request.closed or request.wants_prompt_logprobs):
                positions = min(row.num_computed, request.num_inputs - 1)
                self.blocks.park(row.slot, request, row.seniority, positions)
        self.blocks.release_all()

    def take_all(self) -> list[tuple[int, SchedulableRequest]]:
        """Remove and return every admitted request whose client has not left, with its seniority, in that order."""
        rows = [*self.running, *self._yielded]
        for row in self.rows.values():
            row.entry.num_interrupted = min(row.num_computed, row.entry.num_inputs - 1)
        requests = [(row.seniority, row.entry) for row in rows] + self._admission.take_all()
        self.rows.clear()
        self._multi_token.slots.clear()
        self._preempted.clear()
        self._yielded.clear()
        return sorted((each for each in requests if not each[1].closed), key=lambda each: each[0])

    def take_over(self, other: Planner, requests: Iterable[tuple[int, SchedulableRequest]]) -> None:
        """Replace `other`, and admit `requests`, which `other.take_all` returned, again by replay."""
        self._admission.take_over(other._admission)
        self.readmit(requests)

    def readmit(self, requests: Iterable[tuple[int, SchedulableRequest]]) -> None:
        """Admit requests that were admitted before, each with its seniority, again by replay."""
        for seniority, request in requests:
            self._admission.readmit(seniority, request)

    def limit(self, budgets: Budgets) -> None:
        """Replace the budgets; the number of slots stays."""
        self.budgets = self._prefill.budgets = budgets
        self._admission.limit(budgets)

    def row(self, slot: int) -> Row | None:
        """Return the row in `slot` whose tokens count: a running one, or a preempted one with steps in flight."""
        return self.rows.get(slot) or self._preempted.get(slot)

    def drop(self, row: Row) -> None:
        """Remove `row` for good; the next step drops its sequence."""
        if self.rows.get(row.slot) is row:
            del self.rows[row.slot]
            self._multi_token.slots.discard(row.slot)
            self._to_drop.append(row)
            if row.image_rows and self.images is not None:
                self.images.release(row.entry)
        elif self._preempted.get(row.slot) is row:
            del self._preempted[row.slot]

    def end(self, row: Row) -> None:
        """Remove `row`, whose last token was delivered."""
        self.drop(row)

    def computed(
        self,
        plan: StepPlan,
        failed_slots: Container[int] = (),
        *,
        counts: Iterable[tuple[int, int]] = (),
        computed: Iterable[tuple[int, int, int]] = (),
        failed_images: Collection[int] = (),
    ) -> Progress | None:
        """Register that `plan` has run, before its tokens are delivered: its full blocks may be shared from now on.

        The values of `failed_slots` are not finite, and their blocks are not shared. `counts` and `computed` are as in
        `shards.step_result.StepResult`. Returns the results of multi-token rows; None if the plan has no such rows.

        Raises:
            ValueError: the answer contradicts the plan.

        """
        if plan.encodes and self.images is not None:
            self.images.computed(plan.encodes, failed_images)
            return None
        progress: Progress | None = None
        advances: Iterator[int] = repeat(1)
        if plan.multi_token_slots:
            progress = self._multi_token.verify(
                plan, self.row, counts=counts, computed=computed, failed_slots=failed_slots
            )
            advances = iter(progress.advances) if progress.advances else advances
        filled = chain(plan.chunks, zip(plan.decodes, advances, strict=False))
        rows = self.rows, self._preempted
        advance(filled, rows, self.blocks, failed_slots)
        if plan.saves and self.blocks.states is not None:
            self.blocks.states.computed(plan, rows, failed_slots)
        return progress

    def step_took(self, progress: Progress, seconds: float) -> None:
        """Learn the duration of the step that returned `progress`."""
        self._multi_token.step_took(progress, seconds)

    def answered(self, number: int) -> None:
        """Reuse the slots that no step after `number` can name."""
        if self.images is not None:
            self.images.answered(number)
        while self._retired and self._retired[0][0] <= number:
            _, slot = self._retired.popleft()
            self.blocks.release(slot)
            if self.blocks.states is not None:
                self.blocks.states.release(slot)
            self._admission.free(slot)
            row = self._preempted.pop(slot, None)
            if row is not None and row.has_yielded:
                self._yielded.append(row)
            elif row is not None:
                self._admission.readmit(row.seniority, row.entry)

    def lacks_room(self, waiting: RequestQueue) -> bool:
        """Return whether the head of the queue finds no slot, or too few blocks, as long as no row leaves."""
        return self._admission.lacks_room(waiting, self.rows.values())

    def plan(self, waiting: RequestQueue, *, last_sent: int, last_answered: int) -> StepPlan | None:
        """Return the next step, which counts as sent from now on; None if there is nothing to do."""
        plan = StepPlan()
        self._drop_closed()
        if self.blocks.has_parked:
            self.blocks.free_parked(lambda request: request.closed)
        self._retire(plan, last_sent)
        self.answered(last_answered)
        self.expulsion.requeue(self._yielded, waiting)
        if self.expulsion.digests:
            self._expel(plan)
        if not self.budgets.reserve_all:
            retired = (slot for _, slot in self._retired)
            for row in rows_to_preempt(self.rows.values(), self.blocks, retired):
                self._preempt(row, plan)
        if self.budgets.share_slots:
            self._preempt_for_tenants(waiting, plan)
        self._retire(plan, last_sent)
        if self.images is None:
            self._prefill.plan(waiting, plan)
        elif not self._plan_with_images(self.images, waiting, plan, last_sent):
            return plan
        if self.blocks.states is not None and self.blocks.cache is not None:
            self.blocks.states.plan(plan, self.rows)
        if self.blocks.ledger is not None and plan.has_forward:
            plan.seals = self.blocks.ledger.take_seals()
        return plan if plan.dropped or plan.has_forward or plan.is_encoding else None

    def _plan_with_images(
        self, images: ImageFeatures, waiting: RequestQueue, plan: StepPlan, last_sent: int
    ) -> bool:
        """Plan prompts and decodes, or a tile of a picture in turn with them; whether no tile comes first."""
        for seniority, request in images.take_ready():
            self._admission.readmit(seniority, request)
        if self._is_turn_of_tile(waiting) and self._encodes(images, plan, last_sent):
            return False
        self._steps_since_tile += 1
        self._prefill.plan(waiting, plan)
        if plan.has_forward or (not self._encodes(images, plan, last_sent) and images.lacks_slots):
            plan.freed_images = images.take_freed(last_sent + 1)
        return True

    def _encodes(self, images: ImageFeatures, plan: StepPlan, last_sent: int) -> bool:
        """Have the step encode the next tile, or some layers of it; whether there is one."""
        if not images.has_work:
            return False
        part = images.next_part(self._most_encoder_layers(images))
        plan.encodes.append(part)
        plan.load = StepLoad(tiles=part.cost)
        plan.freed_images = images.take_freed(last_sent + 1)
        self._steps_since_tile = 0
        return True

    def _is_turn_of_tile(self, waiting: RequestQueue) -> bool:
        """Return whether a tile comes before a step of the rows, which do not wait for both a tile and prompts."""
        has_prompts = len(waiting) or self._admission.num_paused or self._prefill.has_prompts
        least = MOST_STEPS_BEFORE_TILE if self.rows and has_prompts else 1
        return self._steps_since_tile >= least

    def _most_encoder_layers(self, images: ImageFeatures) -> int:
        """Return layers that take no longer than half a step of the rows, or than the goal leaves; all without rows."""
        if not self.rows or self._cost is None:
            return images.num_layers
        tile_seconds = self._cost.tile_seconds * images.next_cost
        load = StepLoad(
            decodes=len(self.rows), context=sum([row.num_kv_tokens for row in self.rows.values()])
        )
        step_seconds = self._cost.seconds(load)
        if not tile_seconds or step_seconds is None:
            return 1
        goal = self.budgets.target_inter_token_latency or 0.0
        seconds = max(ENCODER_SHARE * step_seconds, goal - step_seconds)
        return max(1, min(images.num_layers, int(seconds / tile_seconds * images.num_layers)))

    def _drop_closed(self) -> None:
        """Drop the rows whose clients have left."""
        for row in [row for row in self.rows.values() if row.entry.closed]:
            self.drop(row)

    def _retire(self, plan: StepPlan, last_sent: int) -> None:
        if not self._to_drop:
            return
        plan.dropped.extend(row.slot for row in self._to_drop)
        self._retired.extend((last_sent, row.slot) for row in self._to_drop)
        self._to_drop.clear()

    def _expel(self, plan: StepPlan) -> None:
        self.expulsion.withdraw(self._admission.withdraw(self.expulsion.names))
        for row in self.expulsion.take_rows(self.rows.values()):
            self._preempt(row, plan)

    def _preempt_for_tenants(self, waiting: RequestQueue, plan: StepPlan) -> None:
        """Preempt a row of another tenant if the head of the queue finds no room and its tenant has fewer rows."""
        if plan.num_preempted or not len(waiting):
            return
        is_full = len(self.rows) >= self.budgets.max_batch_size
        if self._retired and not (is_full and self._admission.has_free_slot):
            # The retired slots may soon give room enough.
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
