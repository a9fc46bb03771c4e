"""What the host knows of each slot's sequence, and the steps that are laid out from it alone."""

from __future__ import annotations

import numpy as np

from millrace_shard.arrays import Flags, Ints
from millrace_shard.batch.batch_limits import BatchLimits
from millrace_shard.batch.block_tables import BlockTables
from millrace_shard.batch.forced_token_budget import affordable
from millrace_shard.batch.sequence import PARAMETERS, Sequence
from millrace_shard.batch.slots import Slots
from millrace_shard.batch.step import Forward
from millrace_shard.batch.step_layout import StepLayout, StepRows, WideRows, spread
from millrace_shard.errors import StepInvalid
from millrace_shard.sampling.sampling_rows import SamplingRows


class SequenceTable:
    """How far each valid sequence has come, and how its tokens are chosen, in columns by slot."""

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
        self._last_plain: StepLayout | None = None
        """The last step that was plain, if nobody has gone since."""

    def admit(self, sequence: Sequence) -> None:
        """A sequence begins, of whose prompt is computed what is cached."""
        slot, num_inputs = sequence.slot, sequence.num_inputs
        self._num_inputs[slot] = self._num_tokens[slot] = num_inputs
        self._num_computed[slot] = self._num_cached[slot] = sequence.cached_tokens
        self._prompt_logprobs[slot] = sequence.prefill_logprobs
        self._parameters[slot] = sequence.columns()

    def forget_last_step(self) -> None:
        """A sequence has gone, so that no step may repeat the last one."""
        self._last_plain = None

    def num_tokens(self, slots: Ints) -> Ints:
        """[n], tokens that each of `slots` [n] holds, as far as they are settled."""
        return self._num_tokens[slots]

    def num_computed(self, slots: Ints) -> Ints:
        """[n], KV positions that each of `slots` [n] has filled with tokens that count."""
        return self._num_computed[slots]

    def num_cached(self, slots: Ints) -> Ints:
        """[n], KV positions of `slots` [n] that were there when each was admitted."""
        return self._num_cached[slots]

    def may_repeat(self, slots: Ints) -> bool:
        """Whether the last plain step was of exactly these rows, so that `repeat` is worth asking."""
        last = self._last_plain
        return last is not None and np.array_equal(slots, last.slots)

    def repeat(self, step: Forward) -> tuple[StepLayout, WideRows] | None:
        """The layout of a step of exactly the rows of the last plain one, if each is to compute one position again.

        Counts of these sequences have to be settled. It is what `rows` and `prepare` would come to, in a fraction of
        their time; None where they are to be asked.
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
            return last.repeated(starts, np.ones(len(slots), dtype=np.int64)), WideRows()
        allowed, _ = step.allowances()
        wide = allowed > 1
        most_tokens = np.minimum(allowed, self._limits.max_tokens - starts)
        return last.repeated(starts, most_tokens), WideRows(
            slots=slots[wide], computed=starts[wide] + 1
        )

    def rows(self, step: Forward) -> StepRows:
        """What `step` asks for, within what there is room for; nothing changes here.

        A decode computes what its sequence holds and has not computed, as far as it may, there are blocks, and it holds
        up nobody (`extra_positions.py`). Counts of the sequences named, which are here and valid, have to be settled.
        Raises StepInvalid.
        """
        slots = np.concatenate([step.chunk_slots, step.decode_slots])
        num_chunks = len(step.chunk_slots)
        allowed, drafts = step.allowances()
        starts = self._num_computed[slots]
        left = self._num_tokens[slots] - starts
        is_prompt = starts < self._num_inputs[slots]
        if not is_prompt[:num_chunks].all() or is_prompt[num_chunks:].any():
            raise StepInvalid("a chunk of a finished prompt, or a decode of an unfinished one")
        if (step.chunk_tokens < 1).any() or (step.chunk_tokens > left[:num_chunks]).any():
            raise StepInvalid("a chunk of more tokens than its prompt has left, or of none")
        limits = self._limits
        room = self._room(slots, starts)
        # A step sent ahead may name a sequence that has become as long as one can be.
        at_end = starts >= limits.max_tokens
        counts = np.concatenate([step.chunk_tokens, np.minimum(left[num_chunks:], allowed)])
        counts[num_chunks:] = np.minimum(counts, np.maximum(room, 1))[num_chunks:]
        if (counts > room)[~at_end].any():
            raise StepInvalid("a block table too short for its tokens")
        counts[at_end] = 0
        if (extras := np.maximum(counts[num_chunks:] - 1, 0)).any():
            firm = int(counts.sum() - extras.sum())
            taken = affordable(extras, num_firm=firm, tile=limits.row_tile)
            counts[num_chunks:] -= extras - taken
        finished = (counts == left) & ~at_end
        allowed = np.concatenate([np.ones(num_chunks, dtype=np.int64), allowed])
        drafts = np.concatenate([np.zeros(num_chunks, dtype=np.int64), drafts])
        most_guesses = np.minimum(np.minimum(allowed, room) - counts, limits.max_draft_tokens)
        most_guesses = np.minimum(most_guesses, drafts)
        wide, some = allowed > 1, ~at_end
        return StepRows(
            slots=slots[some],
            num_chunks=num_chunks,
            starts=starts[some],
            counts=counts[some],
            finished=finished[some],
            most_guesses=np.where(finished, np.maximum(most_guesses, 0), 0)[some],
            most_tokens=np.minimum(allowed, limits.max_tokens + 1 - starts - counts)[some],
            wide=WideRows(slots=slots[wide], computed=(starts + counts)[wide]),
        )

    def prepare(self, rows: StepRows, guesses: Ints) -> StepLayout:
        """Lay out the rows of a forward pass with so many `guesses` [B] each. At least one row is asked for."""
        slots, starts = rows.slots, rows.starts
        counts = rows.counts + guesses
        token_rows, positions = spread(starts, counts)
        lasts = counts.cumsum() - 1
        prompt_rows = np.flatnonzero(
            self._prompt_logprobs[slots] & (starts < self._num_inputs[slots])
        )
        is_prompt = np.isin(token_rows, prompt_rows)
        # The last token that is sure, and the guesses after it.
        is_last = lasts[token_rows] - np.arange(len(token_rows)) <= guesses[token_rows]
        sampled_tokens = np.flatnonzero(is_last & rows.finished[token_rows])
        logit_rows = np.concatenate([sampled_tokens, lasts[~rows.finished]])
        state_rows = np.flatnonzero(is_prompt | is_last)
        sampled = slots[token_rows[sampled_tokens]]
        yields = np.flatnonzero(rows.finished)
        targets = np.minimum(positions + 1, self._num_inputs[slots[token_rows]] - 1)
        is_plain = (
            not rows.num_chunks
            and len(token_rows) == len(slots)
            and not rows.most_guesses.any()
            and bool(rows.finished.all())
        )
        return StepLayout(
            slots=slots,
            starts=starts,
            counts=counts,
            guesses=guesses,
            logit_rows=logit_rows,
            num_chunks=rows.num_chunks,
            yields=yields,
            yield_slots=slots[yields],
            num_samples=1 + guesses[yields],
            admissions=self._slots.admissions(slots[yields]),
            most_tokens=rows.most_tokens[yields],
            sampled=sampled,
            sampling=SamplingRows(
                parameters=self._parameters[sampled],
                positions=positions[sampled_tokens] + 1,
                table_rows=sampled,
            ),
            unfinished=slots[~rows.finished],
            prompt_rows=prompt_rows,
            state_rows=state_rows,
            logit_states=np.searchsorted(state_rows, logit_rows),
            prompt_states=np.searchsorted(state_rows, np.flatnonzero(is_prompt)),
            prompt_targets=targets[is_prompt],
            is_plain=is_plain,
        )

    def commit(self, prepared: StepLayout, counts: Ints) -> None:
        """Advance the sequences of a step that has run. `counts` [Y] tokens are what each row yields.

        0 where that is not known yet, because tokens were guessed: the row waits to be settled.
        """
        if prepared.is_plain:
            self._last_plain = prepared
        if prepared.is_plain and bool((counts == 1).all()):
            self._num_computed[prepared.slots] = prepared.sampling.positions
            self._num_tokens[prepared.slots] = prepared.sampling.positions + 1
        else:
            computed = prepared.starts + prepared.counts - prepared.guesses
            self._num_computed[prepared.slots] = computed
            self._num_tokens[prepared.yield_slots] += counts

    def settle(self, slots: Ints, admissions: Ints, counts: Ints) -> Flags:
        """Advance rows whose guesses have been looked at: all of their `counts` tokens but the last are computed.

        Returns which of the sequences, told by their admission, are still there.
        """
        there = self._slots.hold(slots, admissions)
        self._num_tokens[slots[there]] += counts[there]
        self._num_computed[slots[there]] += counts[there] - 1
        return there

    def _room(self, slots: Ints, starts: Ints) -> Ints:
        """Positions from `starts` on that there are blocks for, within the longest sequence."""
        room: Ints = np.minimum(self._blocks.capacity(slots), self._limits.max_tokens) - starts
        return room
