"""The sequences that run together, by slot: tables on the host, token table and block tables on the device.

Each step reads the ids of its rows from the token table on the device, where sampling has written them. So the host
can lay out a step before it has read the tokens of the previous step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.adapters.adapter_store import SequenceAdapters
from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.device_tables import BatchLimits, BlockTables, TokenTable, Uncleared
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.sequence_images import FeatureRows, SequenceImages
from millrace_shard.batch.sequence_states import SequenceStates
from millrace_shard.batch.sequence_table import SequenceTable, Slots
from millrace_shard.batch.step import BatchChange, Forward
from millrace_shard.batch.step_layout import StepLayout, spread
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload, upload_columns
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.lora.adapter_table import AdapterRows, AdapterTable
from millrace_shard.kernels.ragged import RaggedBatch, with_windows
from millrace_shard.kernels.states import LayerState
from millrace_shard.sampling.sampling_rows import DeviceRows, SlotParameters

UNKNOWN = 0x7FC00000
"""The bits of a float32 that is not a number."""


class PendingScores:
    """A token is scored by the position before it, so the last score of a chunk waits for the next chunk.

    A score is a row of pairs of int32, an id and the bits of its log probability: first the token itself, whose id
    is undefined, then its candidates, the likeliest first.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.num_candidates: Ints = np.zeros(size, dtype=np.int64)
        """[size], candidates that each slot reports."""
        self._table = torch.zeros(size, 1, 2, dtype=torch.int32, device=device)

    def admit(self, slot: int, num_candidates: int) -> None:
        """Start a prompt; its first token is not scored."""
        self.num_candidates[slot] = num_candidates
        missing = 1 + num_candidates - self._table.shape[1]
        if missing > 0:
            wider = self._table.new_zeros(len(self._table), missing, 2)
            self._table = torch.cat([self._table, wider], dim=1)
        self._table[slot, :, 0] = 0
        self._table[slot, :, 1] = UNKNOWN

    def exchange(self, slots: Tensor, scores: Tensor) -> Tensor:
        """Store `scores` [n, 1 + W, 2] for `slots` [n], and return the scores stored earlier, as wide."""
        width = scores.shape[1]
        earlier = self._table[slots, :width]
        self._table[slots, :width] = scores
        return earlier


class FailedSequences:
    """A flag for each slot on the device. The host reads flags only where this needs no wait."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._flags = torch.zeros(size + 1, dtype=torch.bool, device=device)
        """[slots + 1]; the last one is for padding."""
        self._may_have_some = False

    def clear(self) -> None:
        """Every sequence has left. The flag of a slot is reset when the next sequence joins in this slot."""
        self._may_have_some = False

    def admit(self, slot: int) -> None:
        """Reset the flag of `slot` for a new sequence."""
        self._flags[slot] = False

    def add(self, slots: Ints, failed: Tensor) -> None:
        """Set the flag of each of `slots` [n] whose `failed` [n] bool is set."""
        self._add(upload(slots, self._device), failed)

    def with_earlier(
        self, layout: StepLayout, failed: Tensor, slots: Tensor | None = None
    ) -> Tensor:
        """Set the flags of samples that have `failed` [R] bool; the result has earlier failures too.

        `slots` [R] are the samples' slots, if they are on the device already.
        """
        if transfers.is_synchronous(self._device) and not (
            self._may_have_some or failed.numpy().any()
        ):
            return failed
        if slots is None:
            slots = upload(layout.sampled, self._device)
        if len(layout.sampled) > len(layout.yields):
            self._add(slots, failed)
            return self._flags[slots]
        return self.merge(slots, failed)

    def merge(self, slots: Tensor, failed: Tensor) -> Tensor:
        """The same as `with_earlier`, for one sample of each of `slots` [R] on the device."""
        self._may_have_some = True
        failed = self._flags[slots].logical_or_(failed)
        self._flags[slots] = failed
        return failed

    def _add(self, slots: Tensor, failed: Tensor) -> None:
        """A slot that is named several times has failed if any of its samples has failed."""
        self._may_have_some = True
        counts = torch.zeros(len(self._flags), dtype=torch.int32, device=self._device)
        self._flags |= counts.index_add_(0, slots, failed.to(torch.int32)) > 0


logger = logging.getLogger(__name__)


class Batch:
    """At most `max_batch_size` sequences. Methods raise StepInvalid for a step that contradicts the batch."""

    def __init__(
        self,
        limits: BatchLimits,
        device: torch.device,
        adapters: AdapterTable | None = None,
        states: tuple[LayerState, ...] = (),
        features: FeatureRows | None = None,
    ) -> None:
        """`states` are the pages of each recurrent layer.

        Without `adapters`, a sequence with an adapter is invalid; without `features`, one with images is.
        """
        size = limits.max_batch_size
        self.limits = limits
        self.device = device
        self.padding_slot = size
        """An extra row of the tables: one token with id 0, in the padding block."""
        self.token_table = TokenTable(size, limits.table_width * limits.block_size + 1, device)
        self.blocks = BlockTables(limits, device)
        self.slots = Slots(size)
        self.sequences = SequenceTable(limits, self.slots, self.blocks)
        self.adapters = SequenceAdapters(size, adapters, device)
        self.states = SequenceStates(
            size,
            states,
            device,
            num_second=limits.second_pages,
            max_draft_tokens=limits.max_draft_tokens,
        )
        self.images = SequenceImages(features, device, size + 1)
        self.failed = FailedSequences(size, device)
        self.parameters = SlotParameters(size, device)
        """Sampling parameters on the device, where it computes while the host goes on."""
        self._rows = torch.arange(size + 1, device=device)
        self._starts = self._rows.to(torch.int32)
        self.pending_scores = PendingScores(size, device)
        """Scores by the last computed token of each prompt, which the next chunk reports."""

    def __len__(self) -> int:
        return self.slots.num_in_use

    def clear(self) -> None:
        self.sequences.forget_last_step()
        self.failed.clear()
        self.slots.clear()
        self.blocks.clear()
        self.states.clear()
        self.images.clear()

    def apply(self, change: BatchChange) -> Uncleared:
        """Drop, admit and grow sequences, in this order; returns what to clear before the next forward pass.

        An invalid sequence holds its slot until it is dropped, and has neither tokens nor blocks.
        """
        faults = [self._fault(sequence) for sequence in change.admitted]
        self.drop(change.dropped_slots)
        for sequence, fault in zip(change.admitted, faults, strict=True):
            self.slots.take(sequence.slot, is_valid=fault is None)
            if fault is None:
                self._admit(sequence)
            else:
                logger.error("a sequence is invalid and fails: %s", fault)
        self._upload_parameters(change.admitted)
        return self._grow(change.grown_slots, change.grown_blocks)

    def drop(self, slots: Ints) -> None:
        if not len(slots):
            return
        self.sequences.forget_last_step()
        self.slots.check(slots)
        self.blocks.drop(slots)
        self.states.drop(slots)
        self.images.drop(slots)
        self.slots.free(slots)

    def without_invalid(self, step: Forward) -> tuple[Forward, Ints]:
        """`step` without the rows of invalid sequences, and their slots; the other rows name sequences of the batch."""
        slots = self._checked_slots(step)
        invalid = self.slots.invalid(slots)
        if not invalid.any():
            return step, no_ints()
        return step.without(*np.split(invalid, [len(step.chunk_slots)])), slots[invalid]

    def _fault(self, sequence: Sequence) -> StepInvalid | None:
        limits = self.limits
        try:
            sequence.check(
                vocab_size=limits.vocab_size,
                max_tokens=limits.max_tokens,
            )
            self.adapters.check(sequence.adapter_slot)
            self.states.check(sequence)
            self.images.check(sequence)
        except StepInvalid as error:
            return error
        return None

    def _admit(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self.sequences.admit(sequence)
        self.token_table.begin(slot, sequence.input_ids)
        self.blocks.begin(slot, sequence.window_starts)
        self.failed.admit(slot)
        self.states.admit(sequence)
        self.images.admit(sequence)
        self.adapters.admit(slot, sequence.adapter_slot)
        if sequence.prefill_logprobs:
            num_candidates = min(sequence.prefill_top_n_tokens, self.limits.vocab_size)
            self.pending_scores.admit(slot, num_candidates)

    def _upload_parameters(self, admitted: tuple[Sequence, ...]) -> None:
        valid = [each.slot for each in admitted if self.slots.is_valid(each.slot)]
        if valid and not transfers.is_synchronous(self.device):
            slots = np.array(valid)
            self.parameters.admit(slots, self.sequences.parameters(slots))

    def _grow(self, slots: Ints, blocks: Ints) -> Uncleared:
        if len(slots) != len(blocks):
            raise StepInvalid(f"{len(slots)} slots are to grow by {len(blocks)} blocks")
        self.slots.check_known(slots)
        valid = ~self.slots.invalid(slots)
        slots, blocks = slots[valid], blocks[valid]
        return self.blocks.grow(slots, blocks, self.sequences.num_cached(slots))

    def _checked_slots(self, step: Forward) -> Ints:
        """Slots of all rows of `step`, whose columns fit together."""
        if len(step.chunk_slots) != len(step.chunk_tokens):
            raise StepInvalid("the columns of chunks differ in length")
        slots = np.concatenate([step.chunk_slots, step.decode_slots])
        # Raises StepInvalid for columns that do not fit.
        _ = step.decode_limits
        self.slots.check(slots)
        return slots

    def ragged(
        self,
        slots: Ints,
        starts: Ints,
        counts: Ints,
        logit_rows: Ints,
        num_drafts: Ints | None = None,
    ) -> RaggedBatch:
        """The model's input for `counts` [B] tokens of `slots` [B] from positions `starts` [B] on, by one copy.

        The model returns the logits of `logit_rows` [L] among these tokens. The last `num_drafts` [B] tokens of each
        row are draft tokens, or none.
        """
        ragged, _ = self.ragged_with(slots, starts, counts, logit_rows, ())
        states = self.states.rows(slots, starts, counts, num_drafts)
        return ragged if states is None else replace(ragged, states=states)

    def ragged_with(
        self, slots: Ints, starts: Ints, counts: Ints, logit_rows: Ints, others: Many[Ints]
    ) -> tuple[RaggedBatch, tuple[Tensor, ...]]:
        """The same as `ragged`, with `others` on the device by the same copy, and without states."""
        token_rows, positions = spread(starts, counts)
        token_slots = slots[token_rows]
        context = starts + counts
        cache_rows = self.blocks.cache_rows(token_slots, positions)
        bounds = np.concatenate([[0], counts.cumsum(), context])
        is_synchronous = transfers.is_synchronous(self.device)
        # The host reads ids itself where it can.
        read = no_ints() if is_synchronous else token_slots
        changes = self.blocks.take_changes()
        windows = [
            self.blocks.cache_rows(token_slots, positions, group)
            for group in range(1, self.blocks.num_groups)
        ]
        columns = [positions, cache_rows, slots, logit_rows, bounds, read, changes]
        uploaded = upload_columns([*columns, *windows, *others], self.device)
        token_positions, rows, slot, device_logit_rows, bound, token_slot, change = uploaded[:7]
        window_rows, uploaded = uploaded[7 : 7 + len(windows)], uploaded[7 + len(windows) :]
        self.blocks.change(change)
        narrow = bound.to(torch.int32)
        width = -(-int(context.max()) // self.limits.block_size)
        if is_synchronous:
            ids = self.token_table.read(token_slots, positions)
        else:
            ids = self.token_table.take(token_slot, token_positions)
        tables = [
            self.blocks.tables[:, :width].index_select(0, table_rows)
            for table_rows in self.blocks.rows_of_groups(slot)
        ]
        ragged = RaggedBatch(
            ids=ids,
            positions=token_positions,
            cache_rows=rows,
            query_starts=narrow[: len(slots) + 1],
            context_lengths=narrow[len(slots) + 1 :],
            block_tables=tables[0],
            logit_rows=device_logit_rows,
            num_queries=tuple(counts.tolist()),
            num_context=tuple(context.tolist()),
            adapters=self.adapters.rows(slots, counts, logit_rows),
        )
        return with_windows(ragged, [*zip(window_rows, tables[1:], strict=True)]), uploaded

    def ragged_decodes(self, slots: Ints, starts: Ints) -> RaggedBatch:
        """The same as `ragged`, for rows of one token each, with the logits of every row."""
        size, context = len(slots), starts + 1
        width = -(-int(context.max()) // self.limits.block_size)
        groups = range(self.blocks.num_groups)
        columns = [starts, *(self.blocks.cache_rows(slots, starts, group) for group in groups)]
        positions, cache_rows, *window_rows = upload_columns(columns, self.device)
        tables = [upload(self.blocks.rows(slots, width, group), self.device) for group in groups]
        ragged = RaggedBatch(
            ids=self.token_table.read(slots, starts),
            positions=positions,
            cache_rows=cache_rows,
            query_starts=self._starts[: size + 1],
            context_lengths=upload(context.astype(np.int32), self.device),
            block_tables=tables[0],
            logit_rows=self._rows[:size],
            all_logits=True,
            num_queries=(1,) * size,
            num_context=tuple(context.tolist()),
            adapters=self.adapters.rows(slots, None, None),
            states=self.states.rows(slots, starts),
        )
        return with_windows(ragged, [*zip(window_rows, tables[1:], strict=True)])

    def ragged_on_device(
        self,
        slots: Tensor,
        positions: Tensor,
        adapters: AdapterRows | None = None,
        axes: Tensor | None = None,
    ) -> RaggedBatch:
        """The same as `ragged_decodes`, from columns [B] int64 on the device, without states, as a graph can record it.

        Block tables are as the device has them, and as wide as for the longest sequence.
        """
        size, block_size = len(slots), self.limits.block_size
        groups = []
        for rows in self.blocks.rows_of_groups(slots):
            tables = self.blocks.stored.index_select(0, rows)
            blocks = tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
            groups.append((blocks * block_size + positions % block_size, tables))
        (cache_rows, tables), *windows = groups
        ragged = RaggedBatch(
            ids=self.token_table.take(slots, positions),
            positions=positions,
            cache_rows=cache_rows,
            query_starts=self._starts[: size + 1],
            context_lengths=(positions + 1).to(torch.int32),
            block_tables=tables,
            logit_rows=self._rows[:size],
            all_logits=True,
            num_queries=(1,) * size,
            num_context=(tables.shape[1] * block_size,) * size,
            adapters=adapters,
            axes=axes,
        )
        return with_windows(ragged, windows)

    def put(
        self, layout: StepLayout, ids: Tensor, failed: Tensor, rows: DeviceRows | None = None
    ) -> Tensor:
        """Write the sampled `ids` [R] to the token table, where the next step reads them.

        Ids after a rejected draft token lie past the end of their sequence. `failed` [R] bool is stored by sequence;
        the result also has the samples of sequences that failed earlier. `rows` are the sampled rows, if they are on
        the device already.
        """
        if rows is None:
            self.token_table.write(layout.sampled, layout.sampling.positions, ids)
            return self.failed.with_earlier(layout, failed)
        self.token_table.put(rows.slots, rows.positions, ids)
        return self.failed.with_earlier(layout, failed, rows.slots)

    def to_device(self, values: Ints) -> Tensor:
        """A copy of a host column on the device, int64."""
        return upload(values, self.device)
