"""Graphs of forward passes of decodes, one for each of a few batch sizes; a smaller batch is padded.

The input of a graph is a few columns, such as the slots and positions of its rows. The graph reads the ids and block
tables of these slots itself, and a second graph chooses the tokens of most steps, so that a step is one small copy and
two launches. Padding rows have a separate slot and block.
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
from millrace_shard.device.transfers import upload_columns, upload_columns_into, upload_into
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.model_runner.adapter_graphs import AdaptedWork, AdapterGraphs
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun, check_equal
from millrace_shard.model_runner.graph_capture import Capture, Captured, GraphSettings
from millrace_shard.model_runner.token_graphs import NUM_INPUTS, Choice, TokenGraphs
from millrace_shard.model_runner.trial_sequence import TrialSequence, trial_sequence
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.hidden_state_heads import TappedModel

KIND = "CUDA graphs of decodes"
OTHERS_PER_ROW = 8
"""Room for other columns of an upload. A new block takes four places: three of its table and one to clear it."""


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Rows of one token each."""

    slots: Ints
    starts: Ints
    """The position that each row computes."""
    uniforms: Ints
    """See DeviceRows."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The graph of one batch size."""

    inputs: Tensor
    """[4, size] int64 on the device, which the graphs read; see TokenGraphs."""
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
        self._tapped = model if isinstance(model, TappedModel) else None
        self._states: Tensor | None = None
        """The hidden states of the last replay, if a head reads them."""
        if self._tapped is not None:
            self._states = self._tapped.new_states(batch.limits.max_batch_size)
        self._sizes: list[int] = []
        self._buckets: list[_Bucket] = []
        self._tokens = TokenGraphs(batch)
        self._adapters = AdapterGraphs(batch.adapters.table, batch.limits.max_batch_size)
        most = batch.limits.max_batch_size
        num_places = most * (NUM_INPUTS + OTHERS_PER_ROW)
        self._buffer = torch.zeros(num_places, dtype=torch.int64, device=batch.device)
        """The inputs of every size at its beginning, then columns that go up with them."""

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
            adapted = {size: self._adapted(each, trial) for size, each in buckets.items()}
            self._adapters.capture(settings, group, adapted)
        self._sizes = sorted(buckets)
        self._buckets = [buckets[size] for size in self._sizes]
        works = {size: (each.inputs, each.captured.output) for size, each in buckets.items()}
        self._tokens.capture(settings, group, works)

    def fits(self, num_rows: int, adapters: AdapterRows | None) -> bool:
        """Whether there is a graph for `num_rows` rows with these adapters."""
        if not self._sizes or num_rows > self._sizes[-1]:
            return False
        return adapters is None or self._adapters.fits(self._size(num_rows), adapters)

    def upload(self, columns: DecodeColumns, others: Sequence[Ints]) -> tuple[Tensor, ...]:
        """Copy the inputs of rows, which must fit, and `others`, by one copy if there is room.

        Returns the four columns of the rows and `others` on the device, which are valid until the next call.
        """
        bucket = self._bucket(len(columns.slots))
        size, num_rows = bucket.inputs.shape[1], len(columns.slots)
        inputs = self._padded(columns, size).ravel()
        if len(inputs) + sum(map(len, others)) <= len(self._buffer):
            _, *uploaded = upload_columns_into(self._buffer, [inputs, *others])
        else:
            upload_columns_into(self._buffer, [inputs])
            uploaded = list(upload_columns(others, self._batch.device))
        return (*bucket.inputs[:, :num_rows], *uploaded)

    def logits(self, num_rows: int, adapters: AdapterRows | None) -> Tensor:
        """Replay for the `num_rows` rows of the last upload, which have `adapters`: [rows, vocab] float32.

        The logits are valid until the next replay, and the caller may overwrite them. A TappedModel keeps the states.
        """
        if adapters is not None:
            logits = self._adapters.replay(self._size(num_rows), adapters)
        else:
            logits = self._bucket(num_rows).captured.replay()
        if self._tapped is not None and self._states is not None:
            self._tapped.keep(self._states[:num_rows])
        return logits[:num_rows]

    def tokens(self, choice: Choice, num_rows: int) -> Tensor | None:
        """Choose and store tokens from the logits of the last replay, see TokenGraphs.replay."""
        return self._tokens.replay(choice, self._size(num_rows), num_rows)

    def _size(self, num_rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_rows)]

    def _bucket(self, num_rows: int) -> _Bucket:
        return self._buckets[bisect_left(self._sizes, num_rows)]

    def _padded(self, columns: DecodeColumns, size: int) -> Ints:
        num_rows = len(columns.slots)
        inputs = np.empty((NUM_INPUTS, size), dtype=np.int64)
        inputs[:, num_rows:] = [[self._batch.padding_slot], [0], [1], [0]]
        inputs[0, :num_rows] = columns.slots
        inputs[1, :num_rows] = columns.starts
        inputs[2, :num_rows] = columns.starts + 1
        inputs[3, :num_rows] = columns.uniforms
        return inputs

    def _candidate(self, trial: TrialSequence, capture: Capture, size: int) -> Candidate[_Bucket]:
        inputs = self._buffer[: NUM_INPUTS * size].view(NUM_INPUTS, size)
        self._pad(inputs)
        compute = partial(self._forward, inputs)
        return Candidate(
            warm_up=lambda: capture.warm_up(compute),
            record=lambda: _Bucket(inputs, capture.record(compute)),
            compare=lambda bucket: self._compare(inputs, trial, bucket.captured),
        )

    def _adapted(self, bucket: _Bucket, trial: TrialSequence) -> AdaptedWork:
        return AdaptedWork(
            pad=partial(self._pad, bucket.inputs),
            forward=partial(self._forward, bucket.inputs),
            logits=bucket.captured.output,
            compare=partial(self._compare, bucket.inputs, trial),
        )

    def _pad(self, inputs: Tensor) -> None:
        nothing = DecodeColumns(no_ints(), no_ints(), no_ints())
        upload_into(inputs, self._padded(nothing, inputs.shape[1]))

    def _compare(self, inputs: Tensor, trial: TrialSequence, captured: Captured) -> None:
        """Raise RuntimeError if a replay differs from the eager pass over other tables and contexts than captured."""
        slots, positions = trial.rows(inputs.shape[1])
        eager = self._model.forward(self._batch.ragged_decodes(slots, positions), self._cache)
        states = None if self._tapped is None else self._tapped.take()
        columns = DecodeColumns(slots, positions, np.zeros_like(slots))
        upload_into(inputs, self._padded(columns, len(slots)))
        replayed = captured.replay()
        check_equal(replayed, eager, deterministic=self._kernels.deterministic)
        if self._states is not None and states is not None:
            own = self._states[: len(slots)]
            check_equal(own, states, deterministic=self._kernels.deterministic)

    def _forward(self, inputs: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """The recorded work: from the slots and positions of the rows to their logits."""
        slots, positions, _, _ = inputs
        axes = self._batch.images.decoded_axes(slots, positions)
        ragged = self._batch.ragged_on_device(slots, positions, adapters, axes)
        logits = self._model.forward(ragged, self._cache)
        taken = None if self._tapped is None else self._tapped.take()
        if self._states is not None and taken is not None:
            self._states[: len(slots)] = taken
        return logits
