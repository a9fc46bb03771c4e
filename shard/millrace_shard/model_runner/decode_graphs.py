"""Forward passes of decodes as graphs, one for each of a few batch sizes; a smaller batch is padded.

The input of a graph is two columns, the slots and positions of its rows. The graph reads the ids and block tables of
these slots itself, so that a step is one small copy and one launch. Padding rows have a slot and a block of their own.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.device.process_group import CollectiveError, ProcessGroup
from millrace_shard.device.transfers import upload_into
from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_runner.graph_capture import Capture, Captured
from millrace_shard.models.interface import CausalModel

logger = logging.getLogger(__name__)

IMPOSSIBLE, OUT_OF_MEMORY, CAPTURED = range(3)
"""Outcomes of a capture; the ranks agree on the least of their outcomes."""


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """The batch sizes to capture, and the way to capture them."""

    sizes: tuple[int, ...]
    new_capture: Callable[[], Capture]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The graph of one batch size."""

    inputs: Tensor
    """[2, size] int64 on the device, slots and positions, which the graph reads."""
    captured: Captured


class DecodeGraphs:
    """Graphs over the tensors of one batch and one KV cache, which never move. Call `capture` once before `logits`."""

    def __init__(self, model: CausalModel, cache: Sequence[LayerCache], batch: Batch) -> None:
        self._model = model
        self._cache = cache
        self._batch = batch
        device = batch.device
        self._rows = torch.arange(batch.limits.max_batch_size + 1, device=device)
        self._starts = self._rows.to(torch.int32)
        self._sizes: list[int] = []
        self._buckets: list[_Bucket] = []

    @property
    def sizes(self) -> tuple[int, ...]:
        """The captured batch sizes, ascending."""
        return tuple(self._sizes)

    def capture(self, settings: GraphSettings, group: ProcessGroup) -> None:
        """Capture the largest size first, so that the others fit into its memory. This is a collective.

        If a rank runs out of memory, all ranks give up this size and the larger ones and log a warning. Work that
        cannot be captured runs without graphs, with a warning. Raises CollectiveError.
        """
        fitting = {s for s in settings.sizes if 0 < s <= self._batch.limits.max_batch_size}
        capture = settings.new_capture()
        started = time.monotonic()
        for number, size in enumerate(sorted(fitting, reverse=True), 1):
            result = self._try(capture, size)
            # Ranks with different sizes would call collectives of different sizes.
            outcome = group.minimum(_outcome(result))
            if isinstance(result, _Bucket) and outcome == CAPTURED:
                self._sizes.insert(0, size)
                self._buckets.insert(0, result)
                logger.info("Captured CUDA graph %d/%d, batch size %d", number, len(fitting), size)
                continue
            reason = "another rank has failed" if isinstance(result, _Bucket) else result
            self._give_up()
            if outcome == IMPOSSIBLE:
                logger.warning("decoding runs without CUDA graphs, whose capture fails: %s", reason)
                return
            logger.warning("no CUDA graphs from batch size %d on, out of memory: %s", size, reason)
            capture = settings.new_capture()
        if self._sizes:
            seconds = time.monotonic() - started
            logger.info("%d CUDA graphs captured in %.1f s", len(self._sizes), seconds)

    def _give_up(self) -> None:
        self._sizes.clear()
        self._buckets.clear()
        if self._batch.device.type == "cuda":
            torch.cuda.empty_cache()

    def fits(self, num_rows: int) -> bool:
        """Whether there is a graph for `num_rows` rows."""
        return bool(self._sizes) and num_rows <= self._sizes[-1]

    def logits(self, slots: Ints, positions: Ints) -> Tensor:
        """Replay for the tokens at `positions` of `slots`, one for each row, which must fit: [rows, vocab] float32.

        The logits are valid until the next replay, and the caller may overwrite them.
        """
        place = bisect_left(self._sizes, len(slots))
        bucket = self._buckets[place]
        upload_into(bucket.inputs, self._padded(slots, positions, self._sizes[place]))
        return bucket.captured.replay()[: len(slots)]

    def _padded(self, slots: Ints, positions: Ints, size: int) -> Ints:
        inputs = np.empty((2, size), dtype=np.int64)
        inputs[:, len(slots) :] = [[self._batch.padding_slot], [0]]
        inputs[0, : len(slots)] = slots
        inputs[1, : len(slots)] = positions
        return inputs

    def _try(self, capture: Capture, size: int) -> _Bucket | RuntimeError:
        """A bucket, or the error of its capture."""
        no_rows = np.empty(0, dtype=np.int64)
        try:
            padding = torch.from_numpy(self._padded(no_rows, no_rows, size))
            inputs = padding.to(self._batch.device)
            return _Bucket(inputs, capture(lambda: self._forward(inputs)))
        except CollectiveError:
            raise
        except RuntimeError as error:
            # The end of a failed capture may raise another error.
            first = error.__context__
            cause = first if isinstance(first, torch.OutOfMemoryError) else error
            return cause.with_traceback(None)

    def _forward(self, inputs: Tensor) -> Tensor:
        """The recorded work: from the slots and positions of the rows to their logits."""
        batch, size = self._batch, inputs.shape[1]
        block_size = batch.limits.block_size
        slots, positions = inputs
        tables = batch.blocks.tables.index_select(0, slots)
        blocks = tables.gather(1, (positions // block_size).unsqueeze(1)).squeeze(1).long()
        ragged = RaggedBatch(
            ids=batch.token_table.table[slots, positions].long(),
            positions=positions,
            cache_rows=blocks * block_size + positions % block_size,
            query_starts=self._starts[: size + 1],
            context_lengths=(positions + 1).to(torch.int32),
            block_tables=tables,
            logit_rows=self._rows[:size],
            all_logits=True,
            num_queries=(1,) * size,
            num_context=(tables.shape[1] * block_size,) * size,
        )
        return self._model.forward(ragged, self._cache)


def _outcome(result: _Bucket | RuntimeError) -> int:
    if isinstance(result, _Bucket):
        return CAPTURED
    return OUT_OF_MEMORY if isinstance(result, torch.OutOfMemoryError) else IMPOSSIBLE
