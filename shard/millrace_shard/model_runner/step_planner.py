"""Plans steps: verifies the draft tokens of earlier steps, drafts new ones, and lays out the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.step import Forward
from millrace_shard.batch.step_layout import DraftTokens, MultiTokenRows, StepLayout, StepRows
from millrace_shard.batch.step_tokens import PendingVerification, StepTokens
from millrace_shard.speculation.proposer import AcceptanceCheck, Proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows of a step and their draft tokens."""

    layout: StepLayout | None
    """None if there is nothing to compute."""
    drafts: DraftTokens
    multi_token: MultiTokenRows = field(default_factory=MultiTokenRows)
    invalid_slots: Ints = field(default_factory=no_ints)


class StepPlanner:
    """Plans the steps of a batch, with draft tokens if there is a proposer."""

    def __init__(self, batch: Batch, proposer: Proposer | None) -> None:
        self._batch = batch
        self._proposer = proposer
        self._reads_tokens = proposer is not None and proposer.reads_tokens
        self._check = None
        if proposer is not None and proposer.logs:
            self._check = AcceptanceCheck(proposer.likely_reason)
        self._pending = PendingVerification(batch.limits.max_batch_size)
        self._no_drafts = DraftTokens.none(0, batch.device)

    def clear(self) -> None:
        self._pending.clear()

    def plan(self, step: Forward, on_ready: Callable[[], None]) -> StepPlan:
        """Plan `step`; calls `on_ready` before drafting.

        Waits for earlier steps only if a row has unverified draft tokens there, or if the proposer needs their tokens.

        Raises StepInvalid.
        """
        plan = self._repeat(step)
        if plan is not None:
            return plan
        if step.draft_tokens.any():
            # The answer to the previous step must not wait for the draft, or have its time measured with it.
            on_ready()
        step, invalid_slots = self._batch.without_invalid(step)
        self._verify_pending(step)
        rows = self._batch.sequences.rows(self._skip_drafts(step))
        drafts = self._draft(rows)
        layout = self._batch.sequences.lay_out(rows, drafts.counts) if len(rows.slots) else None
        return StepPlan(
            layout=layout,
            drafts=drafts,
            multi_token=rows.multi_token,
            invalid_slots=invalid_slots,
        )

    def add(self, tokens: StepTokens) -> None:
        if self._reads_tokens or len(tokens.unverified):
            self._pending.add(tokens)

    def _repeat(self, step: Forward) -> StepPlan | None:
        """Most steps have the rows of the previous step, one position later."""
        sequences = self._batch.sequences
        if self._proposer is not None:
            if not sequences.may_repeat(step.decode_slots):
                return None
            self._verify_pending(step)
            step = self._skip_drafts(step)
        repeated = sequences.repeat(step)
        if repeated is None:
            return None
        layout, multi_token = repeated
        return StepPlan(
            layout=layout, drafts=self._none(len(layout.slots)), multi_token=multi_token
        )

    def _skip_drafts(self, step: Forward) -> Forward:
        """`step` without draft tokens if the proposer has none for any of its rows."""
        if self._proposer is None or not len(step.draft_tokens):
            return step
        _, max_drafts = step.decode_limits
        slots = step.decode_slots[max_drafts > 0]
        if self._proposer.has_drafts(slots, self._batch.sequences.num_tokens(slots)):
            return step
        return replace(step, draft_tokens=no_ints())

    def _verify_pending(self, step: Forward) -> None:
        """Read the tokens of earlier steps: those that `step` depends on, and those that are done."""
        drafting = step.decode_slots[step.decode_limits[1] > 0] if self._reads_tokens else no_ints()
        for tokens in self._pending.due(step.decode_slots, drafting):
            self._verify(tokens)
            if self._reads_tokens:
                self._read(tokens)

    def _verify(self, tokens: StepTokens) -> None:
        rows = tokens.unverified
        slots, admissions = tokens.layout.yield_slots[rows], tokens.layout.admissions[rows]
        # A failed row yields no token, and fails again in the next step with its slot.
        counts = np.maximum(tokens.emitted.counts[rows], 1)
        held = self._batch.sequences.verify(slots, admissions, counts)
        if self._check is not None:
            drafted = int(tokens.layout.num_samples[rows].sum()) - len(rows)
            self._check.add(drafted, int(counts.sum()) - len(rows))
        if self._proposer is not None:
            computed = self._batch.sequences.num_computed(slots[held])
            self._proposer.verify(slots[held], computed)

    def _read(self, tokens: StepTokens) -> None:
        """Show the proposer the tokens of sequences that are still in the batch."""
        layout, emitted = tokens.layout, tokens.emitted
        held = self._batch.slots.hold(layout.yield_slots, layout.admissions)[emitted.rows]
        slots = layout.yield_slots[emitted.rows]
        if self._proposer is not None:
            self._proposer.read(slots[held], emitted.positions[held], emitted.ids[held])

    def _draft(self, rows: StepRows) -> DraftTokens:
        """Draft tokens for `rows`, written to the token table."""
        if self._proposer is None or not (rows.num_chunks or rows.max_draft_tokens.any()):
            return self._none(len(rows.slots))
        drafts = self._proposer.propose(rows)
        if len(drafts):
            slots, positions = drafts.table_index(rows.slots, rows.num_tokens)
            self._batch.token_table.write(slots, positions, drafts.ids)
        return drafts

    def _none(self, num_rows: int) -> DraftTokens:
        if len(self._no_drafts.counts) != num_rows:
            self._no_drafts = DraftTokens.none(num_rows, self._batch.device)
        return self._no_drafts
