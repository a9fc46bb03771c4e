"""Decides after a failure which requests end, which run next, and how large their steps may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from millrace_router.errors import DoesNotFit, Quarantined, RouterError
from millrace_router.recovery.poison_search import PoisonSearch
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.schedulable import SchedulableRequest
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


PlannerFactory = Callable[[], Planner]
"""Makes the planner of a new epoch, without rows."""


class RecoveryPolicy:
    """Carries entries from a failed epoch into the next, where their tokens are computed again. Does no I/O.

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

    def find_poison(self, plans: Iterable[StepPlan]) -> tuple[Entry, RouterError] | None:
        """Search the rows of failed steps for a poison request; the entry to end, and its error, if one is found."""
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

    def next_epoch(self) -> int:
        """Begin with an empty planner; the number of entries whose tokens are computed again."""
        old, self.planner = self.planner, self._new_planner()
        entries = sorted([*old.take_all(), *self._held], key=lambda held: held[0])
        entries = [held for held in entries if not entry_of(held[1]).stream.ended]
        group = self._search.group
        running = [held for held in entries if not group or held[1].request_id in group]
        self._held = [held for held in entries if group and held[1].request_id not in group]
        self.planner.take_over(old, running)
        self.planner.limit(self._backoff.budgets)
        self.must_regroup = False
        return len(running)

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
        return entries

    def drop_ended(self) -> None:
        """Forget the entries that ended after `next_epoch`, before the first step of the epoch."""
        entries = [held for held in self.planner.take_all() if not entry_of(held[1]).stream.ended]
        self.planner.readmit(entries)
        self._held = [held for held in self._held if not entry_of(held[1]).stream.ended]

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
