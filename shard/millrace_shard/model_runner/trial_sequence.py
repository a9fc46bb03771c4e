"""A short sequence in the KV cache, over which each new graph is compared with the eager pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence import Sequence as BatchSequence
from millrace_shard.batch.step import BatchChange
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.interface import CausalModel

NUM_TOKENS = 300
"""Enough for different positions in all rows of the largest default graph."""
STRIDE = 37
"""A prime number, so that the rows of a step lie all over the sequence."""


class TrialSequence:
    """The sequence of slot 0 in an otherwise empty batch, as long as NUM_TOKENS and the batch allow."""

    def __init__(self, batch: Batch) -> None:
        limits = batch.limits
        room = (min(limits.group_sizes) - 1) * limits.block_size
        self._num_tokens = min(NUM_TOKENS, limits.max_tokens, room)

    def rows(self, size: int) -> tuple[Ints, Ints]:
        """Slots and positions of `size` tokens of the sequence, the last token first; all differ from padding."""
        offsets = np.arange(size, dtype=np.int64) * STRIDE % self._num_tokens
        return np.zeros(size, dtype=np.int64), self._num_tokens - 1 - offsets

    def last(self, count: int, batch: Batch) -> RaggedBatch:
        """The last `count` tokens of the sequence as a step of one chunk, or as many as there are."""
        count = min(count, self._num_tokens)
        starts, counts = np.array([self._num_tokens - count]), np.array([count])
        return batch.ragged(np.zeros(1, dtype=np.int64), starts, counts, np.arange(count))

    def compute(
        self, model: CausalModel, kernels: Kernels, cache: Sequence[LayerCache], batch: Batch
    ) -> None:
        num_blocks = -(-self._num_tokens // batch.limits.block_size)
        ids = (np.arange(self._num_tokens, dtype=np.int64) * 7 + 1) % batch.limits.vocab_size
        # Descending, so that no block is where a wrong table would look for it.
        blocks = np.arange(num_blocks, 0, -1, dtype=np.int64)
        firsts = np.cumsum([0, *batch.limits.group_sizes[:-1]])
        grown = np.concatenate([blocks + first for first in firsts])
        uncleared = batch.apply(
            BatchChange(
                admitted=(BatchSequence(slot=0, request_id=0, input_ids=ids),),
                grown_slots=np.zeros(len(grown), dtype=np.int64),
                grown_blocks=grown,
            )
        )
        index = [batch.to_device(each) for each in batch.blocks.by_group(uncleared.blocks)]
        for layer in cache:
            kernels.zero_blocks(layer, index[layer.group])
        model.forward(self.last(self._num_tokens, batch), cache)


@contextmanager
def trial_sequence(
    model: CausalModel, kernels: Kernels, cache: Sequence[LayerCache], batch: Batch
) -> Iterator[TrialSequence]:
    """A computed sequence in `batch`, which is empty before and after."""
    sequence = TrialSequence(batch)
    try:
        sequence.compute(model, kernels, cache, batch)
        yield sequence
    finally:
        batch.clear()
