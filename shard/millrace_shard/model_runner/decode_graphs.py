"""Forward passes of decodes as graphs, one for each of a few batch sizes; a smaller batch is padded.

The input of a graph is two columns, the slots and positions of its rows. The graph reads the ids and block tables of
these slots itself, so that a step is one small copy and one launch. Padding rows have a slot and a block of their own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints, no_ints
from millrace_shard.batch.batch import Batch
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.transfers import upload_into
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun, check_equal
from millrace_shard.model_runner.graph_capture import Capture, Captured
from millrace_shard.model_runner.graph_settings import GraphSettings
from millrace_shard.model_runner.trial_sequence import TrialSequence, trial_sequence
from millrace_shard.models.interface import CausalModel

KIND = "CUDA graphs of decodes"


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The graph of one batch size."""

    inputs: Tensor
    """[2, size] int64 on the device, slots and positions, which the graph reads."""
    captured: Captured


class DecodeGraphs:
    """Graphs over the tensors of one batch and one KV cache, which never move. Call `capture` once before `logits`."""

    def __init__(
        self, model: CausalModel, kernels: Kernels, cache: Sequence[LayerCache], batch: Batch
    ) -> None:
        self._model = model
        self._kernels = kernels
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
        """Capture the sizes of `settings` as far as possible, see CaptureRun. This is a collective.

        The batch must be empty. Raises CollectiveError, and any error of the eager pass.
        """
        sizes = settings.sizes_up_to(self._batch.limits.max_batch_size)
        if not sizes or not settings.may_capture(KIND):
            return
        run = CaptureRun(KIND, settings, group, self._batch.device)
        with trial_sequence(self._model, self._kernels, self._cache, self._batch) as trial:
            buckets = run.capture(sizes, partial(self._candidate, trial))
        self._sizes = sorted(buckets)
        self._buckets = [buckets[size] for size in self._sizes]

    def fits(self, num_rows: int) -> bool:
        """Whether there is a graph for `num_rows` rows."""
        return bool(self._sizes) and num_rows <= self._sizes[-1]

    def logits(self, slots: Ints, positions: Ints) -> Tensor:
        """Replay for the tokens at `positions` of `slots`, one for each row, which must fit: [rows, vocab] float32.

        The logits are valid until the next replay, and the caller may overwrite them.
        """
        place = bisect_left(self._sizes, len(slots))
        return self._replay(self._buckets[place], slots, positions)

    def _replay(self, bucket: _Bucket, slots: Ints, positions: Ints) -> Tensor:
        upload_into(bucket.inputs, self._padded(slots, positions, bucket.inputs.shape[1]))
        return bucket.captured.replay()[: len(slots)]

    def _padded(self, slots: Ints, positions: Ints, size: int) -> Ints:
        inputs = np.empty((2, size), dtype=np.int64)
        inputs[:, len(slots) :] = [[self._batch.padding_slot], [0]]
        inputs[0, : len(slots)] = slots
        inputs[1, : len(slots)] = positions
        return inputs

    def _candidate(self, trial: TrialSequence, capture: Capture, size: int) -> Candidate[_Bucket]:
        padding = torch.from_numpy(self._padded(no_ints(), no_ints(), size))
        inputs = padding.to(self._batch.device)
        compute = partial(self._forward, inputs)
        return Candidate(
            warm_up=lambda: capture.warm_up(compute),
            record=lambda: _Bucket(inputs, capture.record(compute)),
            compare=lambda bucket: self._compare(bucket, trial),
        )

    def _compare(self, bucket: _Bucket, trial: TrialSequence) -> None:
        """Raise RuntimeError if a replay differs from the eager pass over other tables and contexts than captured."""
        slots, positions = trial.rows(bucket.inputs.shape[1])
        eager = self._model.forward(self._batch.ragged_decodes(slots, positions), self._cache)
        replayed = self._replay(bucket, slots, positions)
        check_equal(replayed, eager, deterministic=self._kernels.deterministic)

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
