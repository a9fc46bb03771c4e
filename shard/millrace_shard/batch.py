"""The sequences that run together, by slot: bookkeeping on the host, token histories and block tables on the device.

The host never reads a sampled token: ids of all rows are read from the history table on the device, where sampling
puts them. So a step can be built before the host has seen the tokens of the one before it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.host_copies import upload, upload_columns
from millrace_shard.prepared import PreparedStep
from millrace_shard.ragged import RaggedBatch
from millrace_shard.sampling import SamplingRows
from millrace_shard.sequence import PARAMETERS, Sequence
from millrace_shard.step import BatchChange, Forward, Ints, StepInvalid, no_ints

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Sizes that are fixed once the KV cache is allocated."""

    max_batch_size: int
    max_tokens: int
    """Longest sequence, in tokens."""
    num_blocks: int
    block_size: int
    vocab_size: int
    padding_block: int = 0
    """Where rows that pad a captured step store their one token: a block that no sequence owns."""

    @property
    def table_width(self) -> int:
        """Blocks a sequence may own: one token more than the longest, for a step sent ahead of its end."""
        return -(-(self.max_tokens + 1) // self.block_size)


class Batch:
    """At most `max_batch_size` sequences. Methods raise StepInvalid where a step contradicts what is here."""

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        size, width = limits.max_batch_size, limits.table_width
        self.limits = limits
        self.device = device
        self._in_use = np.zeros(size, dtype=np.bool_)
        self._is_invalid = np.zeros(size, dtype=np.bool_)
        self._num_inputs = np.zeros(size, dtype=np.int64)
        self._num_tokens = np.zeros(size, dtype=np.int64)
        self._num_computed = np.zeros(size, dtype=np.int64)
        self._num_cached = np.zeros(size, dtype=np.int64)
        self._num_blocks = np.zeros(size, dtype=np.int64)
        self._prompt_logprobs = np.zeros(size, dtype=np.bool_)
        self._parameters = np.zeros(size, dtype=PARAMETERS)
        self._tables = np.zeros((size, width), dtype=np.int32)
        self._num_owners = np.zeros(limits.num_blocks, dtype=np.int32)
        self.padding_slot = size
        """A row of the tables below that is no sequence's: one token of id 0, in the block for padding."""
        self.history = torch.empty(
            size + 1, width * limits.block_size + 1, dtype=torch.int32, device=device
        )
        self.history[self.padding_slot, 0] = 0
        self.tables = torch.zeros(size + 1, width, dtype=torch.int32, device=device)
        self.tables[self.padding_slot, 0] = limits.padding_block
        self.failed = torch.zeros(size, dtype=torch.bool, device=device)
        """Sequences whose logits were not finite once: nothing they yield later counts."""
        self.next_prompt_logprob = torch.zeros(size, dtype=torch.float32, device=device)
        """What the last computed prompt token says of the one after it, which the next chunk reports."""

    def __len__(self) -> int:
        return int(self._in_use.sum())

    def clear(self) -> None:
        """Drop every sequence."""
        self._in_use[:] = False
        self._num_blocks[:] = 0
        self._num_owners[:] = 0

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
        self._check_slots(slots)
        for slot in slots:
            np.subtract.at(self._num_owners, self._tables[slot, : self._num_blocks[slot]], 1)
        self._in_use[slots] = False
        self._num_blocks[slots] = 0

    def without_invalid(self, step: Forward) -> tuple[Forward, Ints]:
        """`step` without the rows of invalid sequences, and their slots."""
        if not (self._in_use & self._is_invalid).any():
            return step, no_ints()
        named = self._rows_of(step)[0]
        chunks, decodes = np.split(~self._is_invalid[named], [len(step.chunk_slots)])
        valid = replace(
            step,
            chunk_slots=step.chunk_slots[chunks],
            chunk_tokens=step.chunk_tokens[chunks],
            decode_slots=step.decode_slots[decodes],
        )
        return valid, named[self._is_invalid[named]]

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
        self._num_inputs[slot] = self._num_tokens[slot] = num_inputs
        self._num_computed[slot] = self._num_cached[slot] = sequence.cached_tokens
        self._prompt_logprobs[slot] = sequence.prefill_logprobs
        self._parameters[slot] = sequence.columns()
        self.history[slot, :num_inputs] = upload(sequence.input_ids, self.device)
        self.failed[slot] = False
        self.next_prompt_logprob[slot] = float("nan")

    def _grow(self, slots: Ints, blocks: Ints) -> Ints:
        if len(slots) != len(blocks):
            raise StepInvalid(f"{len(slots)} slots grow by {len(blocks)} blocks")
        self._check_slots(np.unique(slots))
        valid = ~self._is_invalid[slots]
        slots, blocks = slots[valid], blocks[valid]
        if not len(slots):
            return blocks
        if blocks.min() < 1 or blocks.max() >= self.limits.num_blocks:
            raise StepInvalid(f"blocks are numbered 1 to {self.limits.num_blocks - 1}")
        columns = self._num_blocks[slots] + _occurrence(slots)
        if columns.max() >= self.limits.table_width:
            raise StepInvalid(f"a sequence of over {self.limits.table_width} blocks")
        private = columns * self.limits.block_size >= self._num_cached[slots]
        distinct, places, counts = np.unique(blocks, return_inverse=True, return_counts=True)
        num_owners = self._num_owners[distinct] + counts
        if (num_owners[places[private]] > 1).any():
            raise StepInvalid("a block to be written has another owner")
        self._num_owners[distinct] = num_owners
        self._tables[slots, columns] = blocks
        np.add.at(self._num_blocks, slots, 1)
        index = self.to_device(np.stack([slots, columns, blocks]))
        self.tables[index[0], index[1]] = index[2].to(torch.int32)
        return blocks[private]

    def _check_slots(self, slots: Ints) -> None:
        """Known, and each named once."""
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= len(self._in_use) or not self._in_use[slots].all():
            unknown = set(slots.tolist()) - set(np.flatnonzero(self._in_use).tolist())
            raise StepInvalid(f"no sequence in slots {sorted(unknown)}")
        if len(np.unique(slots)) != len(slots):
            raise StepInvalid("a slot is named twice")

    def _rows_of(self, step: Forward) -> tuple[Ints, Ints]:
        if len(step.chunk_slots) != len(step.chunk_tokens):
            raise StepInvalid("chunks without lengths")
        slots = np.concatenate([step.chunk_slots, step.decode_slots])
        self._check_slots(slots)
        return slots, np.concatenate([step.chunk_tokens, np.ones_like(step.decode_slots)])

    def prepare(self, step: Forward) -> PreparedStep:
        """Lay out the rows of a forward pass. At least one row is asked for; nothing changes here."""
        slots, counts = self._ready_rows(step)
        starts = self._num_computed[slots]
        ends = starts + counts
        bounds = np.concatenate([[0], counts.cumsum()])
        token_rows = np.repeat(np.arange(len(slots)), counts)
        positions = np.arange(bounds[-1]) + (starts - bounds[:-1])[token_rows]
        finished = ends == self._num_tokens[slots]
        prompt_rows = np.flatnonzero(
            self._prompt_logprobs[slots] & (starts < self._num_inputs[slots])
        )
        is_prompt = np.isin(token_rows, prompt_rows)
        wanted = is_prompt.copy()
        last = bounds[1:] - 1
        wanted[last] = True
        logit_rows = np.flatnonzero(wanted)
        logits_of = np.searchsorted(logit_rows, last)
        sampled = slots[finished]
        targets = np.minimum(positions + 1, self._num_inputs[slots[token_rows]] - 1)
        return PreparedStep(
            slots=slots,
            counts=counts,
            positions=positions,
            logit_rows=logit_rows,
            num_chunks=len(step.chunk_slots),
            sampled=sampled,
            sampling=SamplingRows(
                parameters=self._parameters[sampled],
                positions=ends[finished],
                history_rows=sampled,
            ),
            sampling_logits=None if len(logit_rows) == len(sampled) else logits_of[finished],
            unfinished=slots[~finished],
            unfinished_logits=logits_of[~finished],
            prompt_rows=prompt_rows,
            prompt_logits=np.searchsorted(logit_rows, np.flatnonzero(is_prompt)),
            prompt_targets=targets[is_prompt],
        )

    def _ready_rows(self, step: Forward) -> tuple[Ints, Ints]:
        slots, counts = self._rows_of(step)
        left = self._num_tokens[slots] - self._num_computed[slots]
        is_prompt = self._num_computed[slots] < self._num_inputs[slots]
        num_chunks = len(step.chunk_slots)
        if not is_prompt[:num_chunks].all() or is_prompt[num_chunks:].any():
            raise StepInvalid("a chunk of a finished prompt, or a decode of an unfinished one")
        if (counts < 1).any() or (counts > left).any():
            raise StepInvalid("a chunk of more tokens than its prompt has left, or of none")
        capacity = self._num_blocks[slots] * self.limits.block_size
        if (self._num_computed[slots] + counts > capacity).any():
            raise StepInvalid("a block table too short for its tokens")
        return slots, counts

    def ragged(self, prepared: PreparedStep) -> RaggedBatch:
        """The tokens of `prepared` on the device, by one copy."""
        block_size = self.limits.block_size
        slots, counts, positions = prepared.slots, prepared.counts, prepared.positions
        context = self._num_computed[slots] + counts
        token_slots = np.repeat(slots, counts)
        blocks = self._tables[token_slots, positions // block_size].astype(np.int64)
        cache_rows = blocks * block_size + positions % block_size
        bounds = np.concatenate([[0], counts.cumsum(), context])
        columns = [positions, cache_rows, token_slots, slots, prepared.logit_rows, bounds]
        token_positions, rows, token_slot, slot, logit_rows, bound = upload_columns(
            columns, self.device
        )
        narrow = bound.to(torch.int32)
        width = -(-int(context.max()) // block_size)
        return RaggedBatch(
            ids=self.history[token_slot, token_positions].long(),
            positions=token_positions,
            cache_rows=rows,
            query_starts=narrow[: len(slots) + 1],
            context_lengths=narrow[len(slots) + 1 :],
            block_tables=self.tables[:, :width].index_select(0, slot),
            logit_rows=logit_rows,
            num_queries=tuple(counts.tolist()),
            num_context=tuple(context.tolist()),
        )

    def put(self, prepared: PreparedStep, ids: Tensor, failed: Tensor) -> Tensor:
        """Append the sampled `ids` [R] to the histories on the device, where the next step reads them.

        `failed` [R] bool is kept, and returned with those that failed before: what they yield never counts again.
        """
        slots, positions = upload_columns(
            [prepared.sampled, prepared.sampling.positions], self.device
        )
        failed = failed | self.failed[slots]
        self.failed[slots] = failed
        self.history[slots, positions] = ids.to(torch.int32)
        return failed

    def fail(self, slots: Ints, failed: Tensor) -> None:
        """Keep in mind which of `slots` have `failed` [U] bool: what they yield never counts."""
        index = self.to_device(slots)
        self.failed[index] |= failed

    def commit(self, prepared: PreparedStep) -> None:
        """Advance the sequences of a step that has run."""
        self._num_computed[prepared.slots] += prepared.counts
        self._num_tokens[prepared.sampled] += 1

    def to_device(self, values: Ints) -> Tensor:
        """A host column on the device, int64."""
        return upload(values, self.device)


def _occurrence(values: NDArray[np.int64]) -> Ints:
    """For each value, how often it occurred before: [7, 3, 7, 7] gives [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    run = np.repeat(starts, np.diff(np.append(starts, len(values))))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.arange(len(values)) - run
    return ranks
