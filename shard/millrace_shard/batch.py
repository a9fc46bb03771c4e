"""The sequences that run together, by slot: bookkeeping on the host, token histories and block tables on the device.

The host never reads a sampled token: ids of all rows are read from the history table on the device, where sampling
puts them. So a step can be built before the host has seen the tokens of the one before it.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from millrace_shard import cuts
from millrace_shard.batch_limits import BatchLimits
from millrace_shard.block_tables import BlockTables
from millrace_shard.extra_positions import affordable
from millrace_shard.histories import Histories
from millrace_shard.host_copies import upload, upload_columns
from millrace_shard.pending_scores import PendingScores
from millrace_shard.prepared import PreparedStep
from millrace_shard.ragged import RaggedBatch
from millrace_shard.sampling_rows import SamplingRows
from millrace_shard.sequence import PARAMETERS, Sequence
from millrace_shard.step import BatchChange, Flags, Forward, Ints, StepInvalid, no_ints
from millrace_shard.step_rows import StepRows, WideRows, spread

logger = logging.getLogger(__name__)


class Batch:
    """At most `max_batch_size` sequences. Methods raise StepInvalid where a step contradicts what is here."""

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        size = limits.max_batch_size
        self.limits = limits
        self.device = device
        self._in_use = np.zeros(size, dtype=np.bool_)
        self._is_invalid = np.zeros(size, dtype=np.bool_)
        self._admissions = np.zeros(size, dtype=np.int64)
        """How many sequences each slot has held, so that an old one's news is not taken for the present one's."""
        self._num_inputs = np.zeros(size, dtype=np.int64)
        self._num_tokens = np.zeros(size, dtype=np.int64)
        self._num_computed = np.zeros(size, dtype=np.int64)
        self._num_cached = np.zeros(size, dtype=np.int64)
        self._prompt_logprobs = np.zeros(size, dtype=np.bool_)
        self._parameters = np.zeros(size, dtype=PARAMETERS)
        self.padding_slot = size
        """A row of the tables below that is no sequence's: one token of id 0, in the block for padding."""
        self.history = Histories(size, limits.table_width * limits.block_size + 1, device)
        self.blocks = BlockTables(limits, device)
        self.failed = torch.zeros(size, dtype=torch.bool, device=device)
        """Sequences whose logits were not finite once: nothing they yield later counts."""
        self._some_failed = False
        """Whether any of them may be set, where the host can tell."""
        self._last_plain: PreparedStep | None = None
        """The last step that was plain, if nobody has gone since."""
        self._rows = torch.arange(size + 1, device=device)
        self._starts = self._rows.to(torch.int32)
        self.pending_scores = PendingScores(size, device)
        """What the last computed prompt token says of the one after it, which the next chunk reports."""

    def __len__(self) -> int:
        return int(self._in_use.sum())

    def clear(self) -> None:
        """Drop every sequence."""
        self._last_plain = None
        self._some_failed = False
        self._in_use[:] = False
        self.blocks.clear()

    def apply(self, change: BatchChange) -> Ints:
        """Drop, admit, grow, in this order; returns the blocks to be cleared before they are used.

        A sequence that is invalid by itself holds its slot until it is dropped, and has neither tokens nor blocks.
        """
        faults = [self._fault(sequence) for sequence in change.admitted]
        self.drop(change.dropped_slots)
        for sequence, fault in zip(change.admitted, faults, strict=True):
            self._take_slot(sequence.slot)
            self._is_invalid[sequence.slot] = fault is not None
            if fault is None:
                self._admit(sequence)
            else:
                logger.error("a sequence is invalid, and fails alone: %s", fault)
        return self._grow(change.grown_slots, change.grown_blocks)

    def drop(self, slots: Ints) -> None:
        """Forget the sequences in `slots`."""
        if not len(slots):
            return
        self._last_plain = None
        self._check_slots(slots)
        self.blocks.drop(slots)
        self._in_use[slots] = False

    def without_invalid(self, step: Forward) -> tuple[Forward, Ints]:
        """`step` without the rows of invalid sequences, and their slots; what is left names sequences that are here."""
        named = self._named(step)
        step.allowances()
        invalid = self._is_invalid[named]
        if not invalid.any():
            return step, no_ints()
        return step.without(*np.split(invalid, [len(step.chunk_slots)])), named[invalid]

    def is_valid(self, slot: int) -> bool:
        """Whether there is a sequence in `slot`, and it can run."""
        return bool(self._in_use[slot] and not self._is_invalid[slot])

    def _fault(self, sequence: Sequence) -> StepInvalid | None:
        limits = self.limits
        try:
            sequence.check(
                vocab_size=limits.vocab_size,
                max_tokens=limits.max_tokens,
                block_size=limits.block_size,
            )
        except StepInvalid as error:
            return error
        return None

    def _take_slot(self, slot: int) -> None:
        if not 0 <= slot < self.limits.max_batch_size:
            raise StepInvalid(f"slot {slot} is not one of {self.limits.max_batch_size}")
        if self._in_use[slot]:
            raise StepInvalid(f"slot {slot} is in use")
        self._in_use[slot] = True

    def _admit(self, sequence: Sequence) -> None:
        slot, num_inputs = sequence.slot, sequence.num_inputs
        self._admissions[slot] += 1
        self._num_inputs[slot] = self._num_tokens[slot] = num_inputs
        self._num_computed[slot] = self._num_cached[slot] = sequence.cached_tokens
        self._prompt_logprobs[slot] = sequence.prefill_logprobs
        self._parameters[slot] = sequence.columns()
        self.history.begin(slot, sequence.input_ids)
        self.failed[slot] = False
        if sequence.prefill_logprobs:
            most = self.limits.vocab_size
            self.pending_scores.admit(slot, min(sequence.prefill_top_n_tokens, most))

    def _grow(self, slots: Ints, blocks: Ints) -> Ints:
        if len(slots) != len(blocks):
            raise StepInvalid(f"{len(slots)} slots grow by {len(blocks)} blocks")
        self._check_known(slots)
        valid = ~self._is_invalid[slots]
        return self.blocks.grow(slots[valid], blocks[valid], self._num_cached[slots[valid]])

    def _check_slots(self, slots: Ints) -> None:
        """Known, and each named once."""
        self._check_known(slots)
        # numpy's `unique` lets go of the interpreter, and getting it back takes longer than all else here.
        if len(slots) and np.bincount(slots).max() > 1:
            raise StepInvalid("a slot is named twice")

    def _check_known(self, slots: Ints) -> None:
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= len(self._in_use) or not self._in_use[slots].all():
            unknown = set(slots.tolist()) - set(np.flatnonzero(self._in_use).tolist())
            raise StepInvalid(f"no sequence in slots {sorted(unknown)}")

    def _named(self, step: Forward) -> Ints:
        if len(step.chunk_slots) != len(step.chunk_tokens):
            raise StepInvalid("chunks without lengths")
        slots = np.concatenate([step.chunk_slots, step.decode_slots])
        self._check_slots(slots)
        return slots

    def may_repeat(self, slots: Ints) -> bool:
        """Whether the last plain step was of exactly these rows, so that `repeat` is worth asking."""
        last = self._last_plain
        return last is not None and np.array_equal(slots, last.slots)

    def repeat(self, step: Forward) -> tuple[PreparedStep, WideRows] | None:
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
        room = np.minimum(self.blocks.capacity(slots), self.limits.max_tokens) - starts
        if (room < 1).any():
            return None
        if not len(step.decode_tokens):
            return last.repeated(starts, np.ones(len(slots), dtype=np.int64)), WideRows()
        allowed, _ = step.allowances()
        wide = allowed > 1
        most_tokens = np.minimum(allowed, self.limits.max_tokens - starts)
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
        limits = self.limits
        room = np.minimum(self.blocks.capacity(slots), limits.max_tokens) - starts
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
        most_guesses = np.minimum(np.minimum(allowed, room) - counts, limits.max_guesses)
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

    def prepare(self, rows: StepRows, guesses: Ints) -> PreparedStep:
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
        return PreparedStep(
            slots=slots,
            starts=starts,
            counts=counts,
            guesses=guesses,
            logit_rows=logit_rows,
            num_chunks=rows.num_chunks,
            yields=yields,
            yield_slots=slots[yields],
            num_samples=1 + guesses[yields],
            admissions=self._admissions[slots[yields]],
            most_tokens=rows.most_tokens[yields],
            sampled=sampled,
            sampling=SamplingRows(
                parameters=self._parameters[sampled],
                positions=positions[sampled_tokens] + 1,
                history_rows=sampled,
            ),
            unfinished=slots[~rows.finished],
            prompt_rows=prompt_rows,
            state_rows=state_rows,
            logit_states=np.searchsorted(state_rows, logit_rows),
            prompt_states=np.searchsorted(state_rows, np.flatnonzero(is_prompt)),
            prompt_targets=targets[is_prompt],
            is_plain=is_plain,
        )

    def ragged(self, slots: Ints, starts: Ints, counts: Ints, logit_rows: Ints) -> RaggedBatch:
        """`counts` [B] tokens from positions `starts` [B] on of `slots` [B], on the device by one copy.

        The logits of `logit_rows` [L] of these tokens are wanted.
        """
        token_rows, positions = spread(starts, counts)
        token_slots = slots[token_rows]
        context = starts + counts
        cache_rows = self.blocks.cache_rows(token_slots, positions)
        bounds = np.concatenate([[0], counts.cumsum(), context])
        columns = [positions, cache_rows, slots, logit_rows, bounds]
        token_positions, rows, slot, device_logit_rows, bound = upload_columns(columns, self.device)
        narrow = bound.to(torch.int32)
        width = -(-int(context.max()) // self.limits.block_size)
        return RaggedBatch(
            ids=self.history.read(token_slots, positions),
            positions=token_positions,
            cache_rows=rows,
            query_starts=narrow[: len(slots) + 1],
            context_lengths=narrow[len(slots) + 1 :],
            block_tables=self.blocks.tables[:, :width].index_select(0, slot),
            logit_rows=device_logit_rows,
            num_queries=tuple(counts.tolist()),
            num_context=tuple(context.tolist()),
        )

    def ragged_decodes(self, slots: Ints, starts: Ints) -> RaggedBatch:
        """As `ragged`, of one token a row whose logits are all wanted."""
        size, context = len(slots), starts + 1
        width = -(-int(context.max()) // self.limits.block_size)
        columns = [starts, self.blocks.cache_rows(slots, starts)]
        positions, cache_rows = upload_columns(columns, self.device)
        return RaggedBatch(
            ids=self.history.read(slots, starts),
            positions=positions,
            cache_rows=cache_rows,
            query_starts=self._starts[: size + 1],
            context_lengths=upload(context.astype(np.int32), self.device),
            block_tables=upload(self.blocks.rows(slots, width), self.device),
            logit_rows=self._rows[:size],
            wants_all=True,
            num_queries=(1,) * size,
            num_context=tuple(context.tolist()),
        )

    def put(self, prepared: PreparedStep, ids: Tensor, failed: Tensor) -> Tensor:
        """Append the sampled `ids` [R] to the histories on the device, where the next step reads them.

        After a guess that was wrong they are nothing, and lie past the end. `failed` [R] bool is kept by sequence, and
        returned with those that failed before: what they yield never counts again.
        """
        self.history.write(prepared.sampled, prepared.sampling.positions, ids)
        if cuts.may_wait(self.device) and not (self._some_failed or failed.numpy().any()):
            return failed
        slots = self.to_device(prepared.sampled)
        if len(prepared.sampled) > len(prepared.yields):
            self._keep_failed(slots, failed)
            return self.failed[slots]
        self._some_failed = True
        failed = self.failed[slots].logical_or_(failed)
        self.failed[slots] = failed
        return failed

    def fail(self, slots: Ints, failed: Tensor) -> None:
        """Keep in mind which of `slots` have `failed` [U] bool: what they yield never counts."""
        self._keep_failed(self.to_device(slots), failed)

    def _keep_failed(self, slots: Tensor, failed: Tensor) -> None:
        """A slot that is named several times has failed where any of them says so."""
        self._some_failed = True
        counts = torch.zeros(len(self.failed), dtype=torch.int32, device=self.device)
        self.failed |= counts.index_add_(0, slots, failed.to(torch.int32)) > 0

    def commit(self, prepared: PreparedStep, counts: Ints) -> None:
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
        there = self.has(slots, admissions)
        self._num_tokens[slots[there]] += counts[there]
        self._num_computed[slots[there]] += counts[there] - 1
        return there

    def num_tokens(self, slots: Ints) -> Ints:
        """[n], tokens that each of `slots` [n] holds, as far as they are settled."""
        return self._num_tokens[slots]

    def num_computed(self, slots: Ints) -> Ints:
        """[n], KV positions that each of `slots` [n] has filled with tokens that count."""
        return self._num_computed[slots]

    def has(self, slots: Ints, admissions: Ints) -> Flags:
        """Whether each slot holds the sequence that it held then."""
        there: Flags = self._in_use[slots] & (self._admissions[slots] == admissions)
        return there

    def to_device(self, values: Ints) -> Tensor:
        """A host column on the device, int64."""
        return upload(values, self.device)
