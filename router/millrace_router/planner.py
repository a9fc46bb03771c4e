"""What the next step computes. Pure decisions over entries, slots and blocks; no I/O, no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace_router.blocks import BlockTable
from millrace_router.entry import Entry
from millrace_router.waiting import WaitingQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of one step and of the batch, in TGI's names."""

    max_batch_prefill_tokens: int
    """Tokens a step that computes prompt may hold, its decodes included."""
    max_batch_size: int
    """Sequences running at once; slots are numbered below this."""


@dataclass(slots=True, eq=False)
class Row:
    """An admitted entry. Its counts include steps that are still in flight."""

    entry: Entry
    slot: int
    num_prompt_planned: int = 0
    num_tokens_planned: int = 0
    """Generated tokens that the steps planned so far yield; 0 as long as some of the prompt is left."""
    num_kv_owned: int = 0
    """KV positions in the blocks it has got so far."""

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that no step computes yet."""
        return len(self.entry.request.input_ids) - self.num_prompt_planned

    @property
    def num_kv_tokens(self) -> int:
        """KV positions filled once everything planned so far has run."""
        return self.num_prompt_planned + max(0, self.num_tokens_planned - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. Without chunks and decodes it only drops sequences."""

    dropped: tuple[int, ...] = ()
    admitted: tuple[Row, ...] = ()
    grown: tuple[tuple[int, int], ...] = ()
    """(slot, block), in table order."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(slot, prompt tokens to compute)."""
    decodes: tuple[int, ...] = ()

    @property
    def method(self) -> str:
        """TGI's label for metrics."""
        return "prefill" if self.chunks else "decode"

    @property
    def has_forward(self) -> bool:
        """Whether the step runs the model."""
        return bool(self.chunks or self.decodes)


@dataclass(slots=True)
class _Draft:
    chunks: list[tuple[int, int]] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    admitted: list[Row] = field(default_factory=list)
    grown: list[tuple[int, int]] = field(default_factory=list)


class Planner:
    """Decides admission, chunks, decodes and drops; owns slots and blocks.

    A step decodes every row that can, then spends what is left of the prefill budget on prompts in order of
    arrival: first those already admitted, of which the first gets a block's worth whatever is left, then new ones
    while slots and blocks last. The first entry that does not fit stops admission. A dropped row's slot and blocks
    are reused only once every step that named them is answered.
    """

    def __init__(self, budgets: Budgets, blocks: BlockTable) -> None:
        self.budgets = budgets
        self.blocks = blocks
        self.rows: dict[int, Row] = {}
        self._free_slots = list(range(budgets.max_batch_size - 1, -1, -1))
        self._to_drop: list[Row] = []
        self._retired: deque[tuple[int, int]] = deque()
        self._least_chunk = min(blocks.block_size, budgets.max_batch_prefill_tokens)

    def drop(self, row: Row) -> None:
        """Take `row` out of the batch; the shards hear of it with the next step."""
        if self.rows.get(row.slot) is row:
            del self.rows[row.slot]
            self._to_drop.append(row)

    def answered(self, number: int) -> None:
        """Reuse what no step after `number` can still name."""
        while self._retired and self._retired[0][0] <= number:
            _, slot = self._retired.popleft()
            self.blocks.release(slot)
            self._free_slots.append(slot)

    def plan(self, waiting: WaitingQueue, *, last_sent: int, last_answered: int) -> StepPlan | None:
        """The next step, or None when there is nothing to do. The plan counts as sent from here on."""
        dropped = self._drop(last_sent)
        self.answered(last_answered)
        draft = _Draft()
        for slot, row in self.rows.items():
            # Runs for every token there is, hence few calls.
            if 0 < row.num_tokens_planned < row.entry.request.max_new_tokens:
                row.num_tokens_planned += 1
                if row.num_kv_tokens > row.num_kv_owned:
                    self._grow(row, draft)
                draft.decodes.append(slot)
        self._plan_prompts(waiting, draft)
        if not (dropped or draft.chunks or draft.decodes):
            return None
        return StepPlan(
            dropped=dropped,
            admitted=tuple(draft.admitted),
            grown=tuple(draft.grown),
            chunks=tuple(draft.chunks),
            decodes=tuple(draft.decodes),
        )

    def _drop(self, last_sent: int) -> tuple[int, ...]:
        for row in [row for row in self.rows.values() if row.entry.stream.closed]:
            self.drop(row)
        dropped = tuple(row.slot for row in self._to_drop)
        self._retired.extend((last_sent, slot) for slot in dropped)
        self._to_drop.clear()
        return dropped

    def _plan_prompts(self, waiting: WaitingQueue, draft: _Draft) -> None:
        budget = self.budgets.max_batch_prefill_tokens - len(draft.decodes)
        for row in [row for row in self.rows.values() if not row.num_tokens_planned]:
            # Decodes may take the whole budget, but what has been admitted must go on.
            budget -= self._chunk(row, max(budget, self._least_chunk), draft)
            if budget <= 0:
                return
        while budget > 0 and (admitted := self._admit(waiting)) is not None:
            draft.admitted.append(admitted)
            budget -= self._chunk(admitted, budget, draft)

    def _admit(self, waiting: WaitingQueue) -> Row | None:
        entry = waiting.head()
        if entry is None or not self._free_slots or not self.blocks.fits(entry.num_kv_tokens):
            return None
        row = Row(waiting.pop(), self._free_slots.pop())
        self.blocks.reserve(row.slot, entry.num_kv_tokens)
        self.rows[row.slot] = row
        return row

    def _chunk(self, row: Row, budget: int, draft: _Draft) -> int:
        """Plan up to `budget` prompt tokens of `row`; how many it took."""
        num_tokens = min(row.num_prompt_left, budget)
        if num_tokens == 0:
            return 0
        row.num_prompt_planned += num_tokens
        if row.num_prompt_left == 0:
            row.num_tokens_planned = 1
        self._grow(row, draft)
        draft.chunks.append((row.slot, num_tokens))
        return num_tokens

    def _grow(self, row: Row, draft: _Draft) -> None:
        for block in self.blocks.grow(row.slot, row.num_kv_tokens):
            draft.grown.append((row.slot, block))
            row.num_kv_owned += self.blocks.block_size


PlannerFactory = Callable[[], Planner]
"""Makes an empty planner for each new epoch."""
