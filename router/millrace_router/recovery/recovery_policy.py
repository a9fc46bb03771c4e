"""Decides after a failure which requests end, which run next, and how large their steps may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from millrace_router.errors import DoesNotFit, Quarantined, RouterError
from millrace_router.recovery.poison_search import PoisonSearch
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.block_ledger import StoredBlocks
from millrace_router.scheduler.block_manager import BlockManager
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.step_plan import Budgets, Row, StepPlan

STEPS_BEFORE_RELIEF = 256
"""Successful steps before the limits double again."""


class OomBackoff:
    """Halves the batch and the prompt tokens of a step after every failure, down to one row and one block."""

    def __init__(self, budgets: Budgets, *, block_size: int) -> None:
        self._full = budgets
        self._least_tokens = min(block_size, budgets.max_batch_prefill_tokens)
        self._level = 0
        self._num_succeeded = 0

    @property
    def is_off(self) -> bool:
        """Whether steps may be as large as the flags allow."""
        return self._level == 0

    @property
    def budgets(self) -> Budgets:
        """The current limits of a step."""
        full = self._full
        return replace(
            full,
            max_batch_prefill_tokens=max(
                self._least_tokens, full.max_batch_prefill_tokens >> self._level
            ),
            max_batch_size=max(1, full.max_batch_size >> self._level),
        )

    def shrink(self) -> bool:
        """Record that a step ran out of memory; whether the limits could be reduced."""
        before = self.budgets
        self._level += 1
        self._num_succeeded = 0
        if self.budgets == before:
            self._level -= 1
            return False
        return True

    def succeeded(self) -> bool:
        """Record a successful step; whether the limits grew."""
        if self.is_off:
            return False
        self._num_succeeded += 1
        if self._num_succeeded < STEPS_BEFORE_RELIEF:
            return False
        self._level -= 1
        self._num_succeeded = 0
        return True


class PlannerFactory(Protocol):
    """Makes the planner of a new epoch, without rows."""

    def __call__(self, *, blocks: BlockManager | None = None) -> Planner:
        """Return a planner that goes on with `blocks`, prefix cache included; without them all are empty."""


class RecoveryPolicy:
    """Carries entries from a failed epoch into the next, where they go on in kept KV, or are computed again.

    KV is kept only if the caller allows it, and never while a poison request is searched for. Does no I/O.

    The entries of the failed step run first, in the groups of `PoisonSearch`, until each has passed the failed
    position or has ended. All other entries are held back until then.
    """

    def __init__(self, new_planner: PlannerFactory, quarantine: Quarantine) -> None:
        self.planner = new_planner()
        """The planner of the current epoch."""
        self.quarantine = quarantine
        self.must_regroup = False
        """Whether another group runs next, in a new epoch, once no step is in flight."""
        self._new_planner = new_planner
        self._search = PoisonSearch()
        self._search_is_new = False
        """Whether the search began with the last failure."""
        self._keeps = False
        """Whether the epoch began with kept KV."""
        self._held: list[tuple[int, SchedulableRequest]] = []
        self._backoff = OomBackoff(self.planner.budgets, block_size=self.planner.blocks.block_size)

    @property
    def is_searching(self) -> bool:
        """Whether a poison request is searched for, during which no other entry is admitted."""
        return bool(self._search)

    @property
    def num_suspects(self) -> int:
        """The number of suspects of the search."""
        return self._search.count

    @property
    def num_held(self) -> int:
        """The number of entries that are held back."""
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        """Tokens of the entries that are held back."""
        return sum(entry.num_inputs for _, entry in self._held)

    @property
    def budgets(self) -> Budgets:
        """The current limits of a step."""
        return self._backoff.budgets

    def adopt(self, ranks: Sequence[StoredBlocks], mark: int) -> int:
        """Begin with the prefix cache of a router that is gone (`BlockManager.adopt`); return its blocks.

        The first epoch compares them once more when it opens.
        """
        count = self.planner.blocks.adopt(ranks, mark)
        self._keeps = count > 0
        return count

    def find_poison(self, plans: Iterable[StepPlan]) -> tuple[Entry, RouterError] | None:
        """Search the rows of failed steps for a poison request; the entry to end, and its error, if one is found."""
        self._search_is_new = not self._search
        rows = self._rows(plans)
        positions = {row.entry.request_id: row.num_kv_tokens for row in rows}
        poison_id = self._search.fail(positions) if positions else None
        if poison_id is None:
            return None
        poison = entry_of(next(row.entry for row in rows if row.entry.request_id == poison_id))
        self.quarantine.add(
            poison.request,
            num_generated=poison.num_generated,
            reason="its steps failed with other requests and alone",
        )
        return poison, Quarantined()

    def shrink(self, plan: StepPlan) -> tuple[Entry, RouterError] | None:
        """Reduce steps after one ran out of memory; the entry to end, and its error, if it failed at the minimum."""
        if self._backoff.shrink():
            return None
        rows = self._rows([plan])
        return (entry_of(rows[0].entry), DoesNotFit()) if len(rows) == 1 else None

    def next_epoch(self, *, keep: bool = False) -> int:
        """Begin with a new planner; the number of entries that are admitted again.

        `keep` says that the KV of answered steps may serve the next epoch: the failure casts no doubt on it, and the
        shards are expected to have it still. Then every entry parks the blocks with its acknowledged positions, and
        goes on there, and the prefix cache stays. If the epoch opens on other KV memory (`EpochManager.open` returns
        False), the caller calls `forget_kv` before the first plan.

        Nothing is kept if a search for a poison request was on before this failure, so that no request is blamed for
        bytes that it did not write. A search that begins with this failure does not count, because a kill from outside
        is the likelier cause of a first failure.
        """
        old, is_new = self.planner, self._search_is_new
        self._search_is_new = False
        self._keeps = keep and (is_new or not self._search)
        if self._keeps:
            old.park()
        self.planner = self._new_planner(blocks=old.blocks if self._keeps else None)
        entries = sorted([*old.take_all(), *self._held], key=lambda held: held[0])
        entries = [held for held in entries if not entry_of(held[1]).stream.ended]
        self._free_parked_but(entries)
        group = self._search.group
        running = [held for held in entries if not group or held[1].request_id in group]
        self._held = [held for held in entries if group and held[1].request_id not in group]
        self.planner.take_over(old, running)
        self.planner.limit(self._backoff.budgets)
        self.must_regroup = False
        return len(running)

    @property
    def keeps_kv(self) -> bool:
        """Whether the epoch begins with kept KV."""
        return self._keeps

    @property
    def life(self) -> int:
        """The life of the ledger of blocks; 0: there is none."""
        ledger = self.planner.blocks.ledger
        return 0 if ledger is None else ledger.life

    def settle_kv(self, ranks: Sequence[StoredBlocks]) -> str | None:
        """Compare kept KV with the directories of all `ranks`, and forget it on any doubt.

        Returns the reason, as `BlockLedger.settle` does.
        """
        reason = self.planner.blocks.settle(ranks)
        if reason is not None:
            self.forget_kv()
        return reason

    def forget_kv(self) -> None:
        """Let all entries of an epoch without a step be computed again: the shards have not kept their KV."""
        if not self._keeps:
            return
        self._keeps = False
        old, self.planner = self.planner, self._new_planner()
        self.planner.take_over(old, old.take_all())
        self.planner.limit(self._backoff.budgets)

    def computed(self, plan: StepPlan) -> None:
        """Record a successful step, after the planner did."""
        if self._backoff.succeeded():
            self.planner.limit(self._backoff.budgets)
        if self._search:
            for row in self._rows([plan]):
                if self._search.computed(row.entry.request_id, row.num_computed):
                    self._go_on()

    def ended(self, entry: SchedulableRequest) -> None:
        if self._search.ended(entry.request_id):
            self._go_on()

    def take_all(self) -> list[SchedulableRequest]:
        """Remove and return every admitted entry, held ones included."""
        entries = [entry for _, entry in (*self.planner.take_all(), *self._held)]
        self._held.clear()
        self._free_parked_but([])
        return entries

    def drop_ended(self) -> None:
        """Forget the entries that ended after `next_epoch`, before the first step of the epoch."""
        entries = [held for held in self.planner.take_all() if not entry_of(held[1]).stream.ended]
        self.planner.readmit(entries)
        self._held = [held for held in self._held if not entry_of(held[1]).stream.ended]
        self._free_parked_but([*entries, *self._held])

    def _free_parked_but(self, entries: Iterable[tuple[int, SchedulableRequest]]) -> None:
        """Take back what other requests than `entries` have parked."""
        ids = {entry.request_id for _, entry in entries}
        self.planner.blocks.free_parked(lambda request: request.request_id not in ids)

    def _go_on(self) -> None:
        """Run the next group, or all entries once the search has ended."""
        if self._search:
            self.must_regroup = True
        else:
            self.planner.readmit(self._held)
            self._held = []

    def _rows(self, plans: Iterable[StepPlan]) -> list[Row]:
        """Return the rows that `plans` compute and that have not ended, the most senior first."""
        slots = {slot for plan in plans for slot in (*plan.decodes, *(s for s, _ in plan.chunks))}
        rows = [row for row in map(self.planner.row, slots) if row is not None]
        return sorted((row for row in rows if not row.entry.closed), key=lambda row: row.seniority)
