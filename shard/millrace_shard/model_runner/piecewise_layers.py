"""Layers of steps that are not plain decodes, whose work between attentions is replayed from graphs.

All work of a layer but its attention is a function of only the number of tokens. So it is captured in pieces for a few
numbers of tokens. A step is padded to the next number, and its attentions are launched between the replays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from millrace_shard.batch.batch import Batch
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, Layer, LayerCache, Layers, Reduce
from millrace_shard.kernels.layer_blocks import ComposedAttention
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun, check_equal
from millrace_shard.model_runner.graph_capture import Capture, Captured, GraphSettings
from millrace_shard.model_runner.trial_sequence import trial_sequence
from millrace_shard.models.interface import CausalModel

KIND = "CUDA graphs between attentions"
TOKEN_COUNTS = (512, 256, 128, 64)
"""The numbers of tokens that are captured, largest first. There are few, since each takes a graph for every layer.

Larger steps are expected to compute for longer than their launches take. Nothing here has been measured.
"""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The tensors that pieces read and write, with rows for the largest step; a step uses the first rows."""

    residual: Tensor
    """[T, hidden]."""
    columns: Tensor
    """[2, T] int64, positions and cache rows."""
    queries: Tensor
    """[T, num_heads, head_dim] of the next attention."""
    attended: Tensor
    """[T, num_heads * head_dim], the result of the last attention."""
    padding_row: int
    """The cache row of padding."""

    @classmethod
    def allocate(
        cls, num_tokens: int, attention: ComposedAttention, cache: LayerCache, padding_row: int
    ) -> _Buffers:
        """Buffers for steps of at most `num_tokens`, which are padding at first."""
        residual = attention.new_residual(num_tokens)
        columns = torch.zeros(2, num_tokens, dtype=torch.int64, device=residual.device)
        columns[1] = padding_row
        queries = attention.queries(None, residual, _tokens(columns), cache)
        attended = queries.new_zeros(num_tokens, queries[0].numel())
        return cls(residual, columns, queries.new_zeros(queries.shape), attended, padding_row)

    def load(self, residual: Tensor, batch: RaggedBatch, size: int) -> None:
        count = len(residual)
        self.residual[:count] = residual
        self.residual[count:size] = 0
        self.columns[0, :count] = batch.positions
        self.columns[1, :count] = batch.cache_rows
        self.columns[1, count:size] = self.padding_row


class PiecewiseLayers:
    """Layers with a ComposedAttention. A step for which there are no pieces runs through `eager`."""

    def __init__(self, layers: Sequence[Layer], reduce: Reduce | None, eager: Layers) -> None:
        self._attentions = [
            layer.attention for layer in layers if isinstance(layer.attention, ComposedAttention)
        ]
        self._layers = layers
        self._reduce = reduce or _as_it_is
        self._eager = eager
        self._caches: Sequence[LayerCache] = ()
        self._pieces: dict[int, list[Captured]] = {}
        """By number of tokens, ascending."""
        self._buffers: _Buffers

    def allocate(self, num_tokens: int, caches: Sequence[LayerCache], padding_row: int) -> None:
        self._caches = caches
        self._buffers = _Buffers.allocate(num_tokens, self._attentions[0], caches[0], padding_row)

    def use(self, pieces: dict[int, list[Captured]]) -> None:
        self._pieces = dict(sorted(pieces.items()))

    def piece(self, index: int, size: int) -> Tensor:
        """The work on `size` tokens between the attentions of layers `index` - 1 and `index`."""
        buffers, attentions = self._buffers, self._attentions
        residual, x = buffers.residual[:size], None
        if index:
            attended = buffers.attended[:size]
            x = attentions[index - 1].output(attended)
            x = self._layers[index - 1].after(x, residual, self._reduce)
            if index == len(attentions):
                return x
        tokens = _tokens(buffers.columns[:, :size])
        queries = attentions[index].queries(x, residual, tokens, self._caches[index])
        return buffers.queries[:size].copy_(queries)

    def candidate(
        self, compare: Callable[[int, list[Captured]], None], capture: Capture, size: int
    ) -> Candidate[list[Captured]]:
        """The pieces for `size` tokens, one more than there are layers."""
        pieces = [partial(self.piece, index, size) for index in range(len(self._layers) + 1)]

        def warm_up() -> None:
            for piece in pieces:
                capture.warm_up(piece)

        return Candidate(
            warm_up,
            record=lambda: [capture.record(piece) for piece in pieces],
            compare=partial(compare, size),
        )

    def __call__(
        self, residual: Tensor, batch: RaggedBatch, caches: Sequence[LayerCache]
    ) -> Tensor:
        """[T, hidden], valid until the next step; `residual` is changed in place."""
        count, counts = len(residual), tuple(self._pieces)
        index = bisect_left(counts, count)
        if index == len(counts) or batch.adapters is not None:
            return self._eager(residual, batch, caches)
        buffers, size = self._buffers, counts[index]
        buffers.load(residual, batch, size)
        *pieces, last = self._pieces[size]
        for piece, attention, cache in zip(pieces, self._attentions, caches, strict=True):
            piece.replay()
            buffers.attended[:count] = attention.attend(buffers.queries[:count], batch, cache)
        x = last.replay()
        residual.copy_(buffers.residual[:count])
        return x[:count]


def with_pieces(
    model: CausalModel,
    kernels: Kernels,
    cache: Sequence[LayerCache],
    batch: Batch,
    settings: GraphSettings,
    group: ProcessGroup,
) -> CausalModel:
    """The same model with captured pieces over this cache, as far as possible, see CaptureRun. This is a collective.

    Work of the result cannot be captured, since it may replay graphs. The batch must be empty. Raises CollectiveError,
    and any error of the eager pass.
    """
    made: list[PiecewiseLayers] = []

    def make(layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        eager = kernels.layers(layers, reduce)
        if not all(isinstance(layer.attention, ComposedAttention) for layer in layers):
            return eager
        made.append(PiecewiseLayers(layers, reduce, eager))
        return made[0]

    piecewise = model.with_layers(make)
    if not made or not settings.may_capture(KIND):
        return model
    (layers,) = made
    padding_row = batch.limits.padding_block * batch.limits.block_size
    layers.allocate(TOKEN_COUNTS[0], cache, padding_row)

    with trial_sequence(model, kernels, cache, batch) as trial:

        def compare(size: int, captured: list[Captured]) -> None:
            tokens = trial.last(size - 1, batch)
            layers.use({size: captured})
            replayed = piecewise.states(tokens, cache)
            layers.use({})
            eager = model.states(tokens, cache)
            check_equal(replayed, eager, deterministic=kernels.deterministic)

        run = CaptureRun(KIND, settings, group, batch.device)
        layers.use(run.capture(TOKEN_COUNTS, partial(layers.candidate, compare)))
    return piecewise


def _tokens(columns: Tensor) -> RaggedBatch:
    """Tokens at these positions and cache rows [2, T], for work that needs nothing else of a batch."""
    positions, cache_rows = columns
    nothing = columns.new_empty(0)
    return RaggedBatch(
        ids=nothing,
        positions=positions,
        cache_rows=cache_rows,
        query_starts=nothing,
        context_lengths=nothing,
        block_tables=nothing,
        logit_rows=nothing,
        num_queries=(),
        num_context=(),
    )


def _as_it_is(x: Tensor) -> Tensor:
    return x
