"""What becomes of entries in flight when the shards fail: who is to blame, who runs next, in steps of which size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace_router.errors import DoesNotFit, Quarantined, RouterError
from millrace_router.recovery.oom_backoff import OomBackoff
from millrace_router.recovery.poison_search import PoisonSearch
from millrace_router.recovery.quarantine import Quarantine
from millrace_router.request.entry import Entry, entry_of
from millrace_router.request.schedulable import SchedulableRequest
from millrace_router.scheduler.budgets import Budgets
from millrace_router.scheduler.planner import Planner
from millrace_router.scheduler.row import Row
from millrace_router.scheduler.step_plan import StepPlan

PlannerFactory = Callable[[], Planner]
"""Makes an empty planner for each new epoch."""


class RecoveryPolicy:
    """Carries entries from a failed epoch into the next, where they are replayed. Pure decisions, no I/O.

    Entries of the failed step run first, all or in parts (`PoisonSearch`), until each has got past
    what failed, or has ended; the others are held back so long. Without suspects everybody runs.
    """

    def __init__(self, new_planner: PlannerFactory, quarantine: Quarantine) -> None:
        self.planner = new_planner()
        """Of the current epoch."""
        self._new_planner = new_planner
        self._quarantine = quarantine
        self._suspects = PoisonSearch()
        self._held: list[tuple[int, SchedulableRequest]] = []
        self._pressure = OomBackoff(self.planner.budgets, block_size=self.planner.blocks.block_size)
        self.must_regroup = False
        """Whether others are to run now, in an epoch of their own, once no step is in flight."""

    @property
    def is_searching(self) -> bool:
        """Whether nobody else may be admitted, for the sake of those under suspicion."""
        return bool(self._suspects)

    @property
    def num_suspects(self) -> int:
        """How many are under suspicion."""
        return self._suspects.count

    @property
    def num_held(self) -> int:
        """Entries that are held back."""
        return len(self._held)

    @property
    def num_held_tokens(self) -> int:
        """Tokens of those so far."""
        return sum(entry.num_inputs for _, entry in self._held)

    @property
    def budgets(self) -> Budgets:
        """What a step may hold now."""
        return self._pressure.budgets

    def blame(self, plans: Iterable[StepPlan]) -> tuple[Entry, RouterError] | None:
        """Steps have failed for a reason that may lie in their rows; who ends by that, and with what."""
        rows = self._rows(plans)
        named = {row.entry.request_id: row.num_kv_tokens for row in rows}
        guilty_id = self._suspects.failed(named) if named else None
        if guilty_id is None:
            return None
        guilty = entry_of(next(row.entry for row in rows if row.entry.request_id == guilty_id))
        self._quarantine.add(
            guilty.request,
            num_generated=guilty.num_generated,
            reason="it was in a step that failed, in company and alone",
        )
        return guilty, Quarantined()

    def shrink(self, plan: StepPlan) -> tuple[Entry, RouterError] | None:
        """A step ran out of memory; who ends by that, because it cannot be made smaller."""
        if self._pressure.rise():
            return None
        rows = self._rows([plan])
        return (entry_of(rows[0].entry), DoesNotFit()) if len(rows) == 1 else None

    def next_epoch(self) -> int:
        """Put an empty planner in the place of the one there is; how many entries it is going to replay."""
        old, self.planner = self.planner, self._new_planner()
        entries = sorted([*old.take_all(), *self._held], key=lambda held: held[0])
        entries = [held for held in entries if not entry_of(held[1]).stream.ended]
        group = self._suspects.group
        running = [held for held in entries if not group or held[1].request_id in group]
        self._held = [held for held in entries if group and held[1].request_id not in group]
        self.planner.take_over(old, running)
        self.planner.limit(self._pressure.budgets)
        self.must_regroup = False
        return len(running)

    def computed(self, plan: StepPlan) -> None:
        """A step has succeeded, and the planner knows."""
        if self._pressure.succeeded():
            self.planner.limit(self._pressure.budgets)
        if self._suspects:
            for row in self._rows([plan]):
                if self._suspects.computed(row.entry.request_id, row.num_computed):
                    self._go_on()

    def ended(self, entry: SchedulableRequest) -> None:
        """An entry has ended, however it did."""
        if self._suspects.ended(entry.request_id):
            self._go_on()

    def surrender(self) -> list[SchedulableRequest]:
        """Give up, and return, every entry that was ever admitted."""
        entries = [entry for _, entry in (*self.planner.take_all(), *self._held)]
        self._held.clear()
        return entries

    def _go_on(self) -> None:
        """The suspects that ran are cleared: others run now, or everybody does."""
        if self._suspects:
            self.must_regroup = True
        else:
            self.planner.readmit(self._held)
            self._held = []

    def _rows(self, plans: Iterable[StepPlan]) -> list[Row]:
        """The rows that `plans` compute and that have not ended, the most senior first."""
        slots = {slot for plan in plans for slot in (*plan.decodes, *(s for s, _ in plan.chunks))}
        rows = [row for row in map(self.planner.row, slots) if row is not None]
        return sorted((row for row in rows if not row.entry.closed), key=lambda row: row.seniority)
