"""The host's state of each sequence, by slot, and the layouts of steps over it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millrace_proto.sequence import Pooling
from millrace_shard.arrays import Flags, Ints
from millrace_shard.batch.device_tables import BatchLimits, BlockTables
from millrace_shard.batch.sequence import PARAMETERS, Sequence
from millrace_shard.batch.step import Forward
from millrace_shard.batch.step_layout import MultiTokenRows, StepLayout, StepRows, spread
from millrace_shard.errors import StepInvalid
from millrace_shard.sampling.sampling_rows import SamplingRows


class PooledSequences:
    """The poolings of sequences that yield vectors or scores instead of tokens, by slot."""

    def __init__(self, size: int) -> None:
        self._flags = np.zeros(size, dtype=np.bool_)
        self._poolings: dict[int, Pooling] = {}

    def admit(self, slot: int, pooling: Pooling | None) -> None:
        """Note the pooling of a new sequence, in place of its slot's earlier one."""
        if pooling is not None:
            self._flags[slot] = True
            self._poolings[slot] = pooling
        elif self._poolings.pop(slot, None) is not None:
            self._flags[slot] = False

    def are_pooled(self, slots: Ints) -> Flags:
        """[n], whether each of `slots` [n] yields no token."""
        flags: Flags = self._flags[slots]
        return flags

    def of(self, slot: int) -> Pooling:
        """The pooling of `slot`, which has one."""
        return self._poolings[slot]


CPU_TILE = 16
"""Rows of a tile of the matrix unit: one row in another tile lengthens a step by about as much as a full tile."""


def within_budget(extras: Ints, *, num_required: int, tile: int) -> Ints:
    """The part of `extras` [n] positions that a step with `num_required` other positions fills; the rest waits.

    All extras are filled if the last tile of rows has room, or if another tile is worth its cost: half full, or a
    quarter of the required positions. Otherwise the extras of the first rows fill the last tile, so that a few
    positions of one row do not delay all other rows. With a `tile` of 1 all extras are filled.
    """
    room, requested = -num_required % tile, int(extras.sum())
    if requested <= room or requested - room >= min(tile // 2, num_required // 4):
        return extras
    before = extras.cumsum() - extras
    return np.clip(room - before, 0, extras)


class Slots:
    """A table of slots. An invalid sequence also holds its slot until it is dropped."""

    def __init__(self, size: int) -> None:
        self._in_use = np.zeros(size, dtype=np.bool_)
        self._is_invalid = np.zeros(size, dtype=np.bool_)
        self._admissions = np.zeros(size, dtype=np.int64)
        """The number of sequences that each slot has held; it identifies late results of an earlier sequence."""

    @property
    def num_in_use(self) -> int:
        """The number of slots that hold a sequence."""
        return int(self._in_use.sum())

    def clear(self) -> None:
        self._in_use[:] = False

    def take(self, slot: int, *, is_valid: bool) -> None:
        """Put a sequence into `slot`, which must be free. Raises StepInvalid."""
        size = len(self._in_use)
        if not 0 <= slot < size:
            raise StepInvalid(f"slot {slot} is not one of the {size} slots")
        if self._in_use[slot]:
            raise StepInvalid(f"slot {slot} is in use")
        self._in_use[slot] = True
        self._is_invalid[slot] = not is_valid
        self._admissions[slot] += 1

    def free(self, slots: Ints) -> None:
        self._in_use[slots] = False

    def is_valid(self, slot: int) -> bool:
        """Whether `slot` holds a valid sequence."""
        return bool(self._in_use[slot] and not self._is_invalid[slot])

    def invalid(self, slots: Ints) -> Flags:
        """[n], whether each of `slots` [n], all in use, holds an invalid sequence."""
        flags: Flags = self._is_invalid[slots]
        return flags

    def admissions(self, slots: Ints) -> Ints:
        """[n], the admission number of the sequence in each of `slots` [n]."""
        return self._admissions[slots]

    def hold(self, slots: Ints, admissions: Ints) -> Flags:
        """[n], whether each of `slots` [n] holds the sequence with this admission number."""
        held: Flags = self._in_use[slots] & (self._admissions[slots] == admissions)
        return held

    def check_known(self, slots: Ints) -> None:
        """Raise StepInvalid unless all of `slots` are in use."""
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= len(self._in_use) or not self._in_use[slots].all():
            unknown = set(slots.tolist()) - set(np.flatnonzero(self._in_use).tolist())
            raise StepInvalid(f"slots {sorted(unknown)} do not hold sequences")

    def check(self, slots: Ints) -> None:
        """Raise StepInvalid unless all of `slots` are in use and distinct."""
        self.check_known(slots)
        # numpy's `unique` releases the interpreter lock, and taking it again costs more than all other work here.
        if len(slots) and np.bincount(slots).max() > 1:
            raise StepInvalid("a slot is named twice")


class SequenceTable:
    """Progress and sampling parameters of each valid sequence, in columns by slot."""

    def __init__(self, limits: BatchLimits, slots: Slots, blocks: BlockTables) -> None:
        size = limits.max_batch_size
        self._limits = limits
        self._slots = slots
        self._blocks = blocks
        self._num_inputs = np.zeros(size, dtype=np.int64)
        self._num_tokens = np.zeros(size, dtype=np.int64)
        self._num_computed = np.zeros(size, dtype=np.int64)
        self._num_cached = np.zeros(size, dtype=np.int64)
        self._prompt_logprobs = np.zeros(size, dtype=np.bool_)
        self._parameters = np.zeros(size, dtype=PARAMETERS)
        self.pooled = PooledSequences(size)
        """The sequences that yield no token."""
        self._last_plain: StepLayout | None = None
        """The last plain step, unless a sequence has left since."""

    def admit(self, sequence: Sequence) -> None:
        """Add a sequence, whose cached tokens have KV."""
        slot, num_inputs = sequence.slot, sequence.num_inputs
        self._num_inputs[slot] = self._num_tokens[slot] = num_inputs
        self._num_computed[slot] = self._num_cached[slot] = sequence.cached_tokens
        self._prompt_logprobs[slot] = sequence.prefill_logprobs
        self._parameters[slot] = sequence.columns()
        self.pooled.admit(slot, sequence.pooling)

    def parameters(self, slots: Ints) -> NDArray[np.void]:
        """[n] of PARAMETERS, of `slots` [n]."""
        return self._parameters[slots]

    def forget_last_step(self) -> None:
        """A sequence has left, so that no step may repeat the last one."""
        self._last_plain = None

    def num_tokens(self, slots: Ints) -> Ints:
        """[n], verified tokens of each of `slots` [n]."""
        return self._num_tokens[slots]

    def num_computed(self, slots: Ints) -> Ints:
        """[n], KV positions of each of `slots` [n] that hold verified tokens."""
        return self._num_computed[slots]

    def num_cached(self, slots: Ints) -> Ints:
        """[n], KV positions that each of `slots` [n] had at its admission."""
        return self._num_cached[slots]

    def may_repeat(self, slots: Ints) -> bool:
        """Whether the last plain step had exactly these rows, so that `repeat` may succeed."""
        last = self._last_plain
        return last is not None and np.array_equal(slots, last.slots)

    def repeat(self, step: Forward) -> tuple[StepLayout, MultiTokenRows] | None:
        """The layout of a step with the rows of the last plain one, if each row computes one position again.

        The rows of `step` must not have unverified draft tokens. The result equals what `rows` and `lay_out` return, in
        a fraction of their time; None if only they can lay out this step.
        """
        last, slots = self._last_plain, step.decode_slots
        if last is None or len(step.chunk_slots) or step.draft_tokens.any():
            return None
        if not self.may_repeat(slots):
            return None
        starts = self._num_computed[slots]
        if (self._num_tokens[slots] - starts != 1).any():
            return None
        room = self._room(slots, starts)
        if (room < 1).any():
            return None
        if not len(step.decode_tokens):
            return last.repeated(starts, np.ones(len(slots), dtype=np.int64)), MultiTokenRows()
        max_positions, _ = step.decode_limits
        several = max_positions > 1
        max_new_tokens = np.minimum(max_positions, self._limits.max_tokens - starts)
        return last.repeated(starts, max_new_tokens), MultiTokenRows(
            slots=slots[several], computed=starts[several] + 1
        )

    def rows(self, step: Forward) -> StepRows:
        """The rows of `step` within the room of their sequences; the table does not change.

        A decode computes the tokens of its sequence without KV, within its limit of positions, its blocks and the
        budget of forced tokens. All rows must name valid sequences without unverified draft tokens.

        Raises StepInvalid.
        """
        slots = np.concatenate([step.chunk_slots, step.decode_slots])
        num_chunks = len(step.chunk_slots)
        max_positions, max_drafts = step.decode_limits
        starts = self._num_computed[slots]
        left = self._num_tokens[slots] - starts
        self._check_prompts(step, slots, left)
        room = self._room(slots, starts)
        # The router may name a sequence in a step that it has sent before the sequence reached the greatest length.
        at_end = starts >= self._limits.max_tokens
        counts = self._counts(step, left, room, at_end)
        finished = (counts == left) & ~at_end
        pooled = finished & self.pooled.are_pooled(slots)
        finished &= ~pooled
        max_positions = np.concatenate([np.ones(num_chunks, dtype=np.int64), max_positions])
        max_drafts = np.concatenate([np.zeros(num_chunks, dtype=np.int64), max_drafts])
        fitting = np.minimum(max_positions, room) - counts
        max_drafts = np.minimum(np.minimum(fitting, self._limits.max_draft_tokens), max_drafts)
        max_new_tokens = np.minimum(max_positions, self._limits.max_tokens + 1 - starts - counts)
        several, some = max_positions > 1, ~at_end
        return StepRows(
            slots=slots[some],
            num_chunks=num_chunks,
            starts=starts[some],
            counts=counts[some],
            finished=finished[some],
            pooled=pooled[some],
            max_draft_tokens=np.where(finished, np.maximum(max_drafts, 0), 0)[some],
            max_new_tokens=max_new_tokens[some],
            multi_token=MultiTokenRows(slots=slots[several], computed=(starts + counts)[several]),
        )

    def _check_prompts(self, step: Forward, slots: Ints, left: Ints) -> None:
        """Raise StepInvalid unless chunks are of unfinished prompts and not longer, and decodes of finished ones."""
        num_chunks = len(step.chunk_slots)
        is_prompt = self._num_computed[slots] < self._num_inputs[slots]
        if not is_prompt[:num_chunks].all() or is_prompt[num_chunks:].any():
            raise StepInvalid("a chunk of a finished prompt, or a decode of an unfinished one")
        if self.pooled.are_pooled(step.decode_slots).any():
            raise StepInvalid("a decode of a sequence that yields no token")
        if (step.chunk_tokens < 1).any() or (step.chunk_tokens > left[:num_chunks]).any():
            raise StepInvalid("a chunk has more tokens than its prompt has left, or none")

    def _counts(self, step: Forward, left: Ints, room: Ints, at_end: Flags) -> Ints:
        """[B], tokens that each row computes without draft tokens, of those `left`. Raises StepInvalid."""
        num_chunks = len(step.chunk_slots)
        max_positions, _ = step.decode_limits
        counts = np.concatenate([step.chunk_tokens, np.minimum(left[num_chunks:], max_positions)])
        counts[num_chunks:] = np.minimum(counts, np.maximum(room, 1))[num_chunks:]
        if (counts > room)[~at_end].any():
            raise StepInvalid("a block table is too short for the tokens of its sequence")
        counts[at_end] = 0
        if (extras := np.maximum(counts[num_chunks:] - 1, 0)).any():
            num_required = int(counts.sum() - extras.sum())
            kept = within_budget(extras, num_required=num_required, tile=self._limits.row_tile)
            counts[num_chunks:] -= extras - kept
        return counts

    def lay_out(self, rows: StepRows, num_drafts: Ints) -> StepLayout:
        """Lay out at least one row, with `num_drafts` [B] draft tokens."""
        slots, starts = rows.slots, rows.starts
        counts = rows.counts + num_drafts
        token_rows, positions = spread(starts, counts)
        lasts = counts.cumsum() - 1
        prompt_rows = np.flatnonzero(
            self._prompt_logprobs[slots] & (starts < self._num_inputs[slots])
        )
        is_prompt = np.isin(token_rows, prompt_rows)
        # The last token without draft tokens, and the draft tokens.
        is_last = lasts[token_rows] - np.arange(len(token_rows)) <= num_drafts[token_rows]
        sampled_tokens = np.flatnonzero(is_last & rows.finished[token_rows])
        unfinished = ~(rows.finished | rows.pooled)
        logit_rows = np.concatenate([sampled_tokens, lasts[unfinished]])
        state_rows = np.flatnonzero(is_prompt | is_last)
        sampled = slots[token_rows[sampled_tokens]]
        yields = np.flatnonzero(rows.finished)
        targets = np.minimum(positions + 1, self._num_inputs[slots[token_rows]] - 1)
        return StepLayout(
            slots=slots,
            starts=starts,
            counts=counts,
            num_drafts=num_drafts,
            logit_rows=logit_rows,
            num_chunks=rows.num_chunks,
            yields=yields,
            yield_slots=slots[yields],
            num_samples=1 + num_drafts[yields],
            admissions=self._slots.admissions(slots[yields]),
            max_new_tokens=rows.max_new_tokens[yields],
            sampled=sampled,
            sampling=SamplingRows(
                parameters=self._parameters[sampled],
                positions=positions[sampled_tokens] + 1,
                table_rows=sampled,
            ),
            unfinished=slots[unfinished],
            pooled=slots[rows.pooled],
            prompt_rows=prompt_rows,
            state_rows=state_rows,
            logit_states=np.searchsorted(state_rows, logit_rows),
            pooled_states=np.searchsorted(state_rows, lasts[rows.pooled]),
            prompt_states=np.searchsorted(state_rows, np.flatnonzero(is_prompt)),
            prompt_targets=targets[is_prompt],
            is_plain=_is_plain(rows, len(token_rows)),
        )

    def commit(self, layout: StepLayout, counts: Ints) -> None:
        """Advance the sequences of a step that has run, each row of which yields `counts` [Y] tokens.

        A row with draft tokens has a count of 0 here and advances with `verify`.
        """
        if layout.is_plain:
            self._last_plain = layout
        if layout.is_plain and bool((counts == 1).all()):
            self._num_computed[layout.slots] = layout.sampling.positions
            self._num_tokens[layout.slots] = layout.sampling.positions + 1
        else:
            computed = layout.starts + layout.counts - layout.num_drafts
            self._num_computed[layout.slots] = computed
            self._num_tokens[layout.yield_slots] += counts

    def verify(self, slots: Ints, admissions: Ints, counts: Ints) -> Flags:
        """Advance rows whose draft tokens were verified: all of their `counts` tokens but the last have KV.

        Returns whether each slot still holds the sequence with this admission number; others do not advance.
        """
        held = self._slots.hold(slots, admissions)
        self._num_tokens[slots[held]] += counts[held]
        self._num_computed[slots[held]] += counts[held] - 1
        return held

    def _room(self, slots: Ints, starts: Ints) -> Ints:
        """Positions from `starts` on within the blocks of each sequence and the greatest length."""
        room: Ints = np.minimum(self._blocks.capacity(slots), self._limits.max_tokens) - starts
        return room


def _is_plain(rows: StepRows, num_tokens: int) -> bool:
    return (
        not rows.num_chunks
        and num_tokens == len(rows.slots)
        and not rows.max_draft_tokens.any()
        and bool(rows.finished.all())
    )
