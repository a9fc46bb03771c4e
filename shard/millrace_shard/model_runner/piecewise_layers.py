"""Layers of steps that are not plain decodes, whose work between attentions is replayed from graphs.

All work of a layer but its attention is a function of only the number of tokens. So it is captured in pieces for a few
numbers of tokens. A step is padded to the next number, and its attentions are launched between the replays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from millrace_shard.batch.batch import Batch
from millrace_shard.device.failures import is_out_of_memory
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, Layer, LayerCache, Layers, Reduce
from millrace_shard.kernels.latent_blocks import LatentAttention
from millrace_shard.kernels.layer_blocks import ComposedAttention
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_runner.capture_run import Candidate, CaptureRun, check_equal
from millrace_shard.model_runner.graph_capture import Capture, Captured, GraphSettings
from millrace_shard.model_runner.trial_sequence import trial_sequence
from millrace_shard.models.interface import CausalModel, MakeLayers
from millrace_shard.speculation.hidden_state_heads import TappedModel

KIND = "CUDA graphs between attentions"
TOKEN_COUNTS = (512, 256, 128, 64)
"""The numbers of tokens that are captured, largest first. There are few, since each takes a graph for every layer."""
LARGE_TOKEN_COUNTS = (2048, 1024)
"""Those that are captured, too, if the launches of such a step outlast its computation, as with small models."""

PieceAttention = ComposedAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The tensors that pieces read and write, with rows for the largest step; a step uses the first rows."""

    residual: Tensor
    """[T, hidden]."""
    columns: Tensor
    """[1 + groups, T] int64: positions, then cache rows in each group of layers."""
    queries: Tensor
    """[T, num_heads, head_dim] of the next attention."""
    attended: Tensor
    """[T, attended_width], the result of the last attention."""
    padding_rows: Tensor
    """[groups, 1] int64, the cache row of padding in each group."""

    @classmethod
    def allocate(
        cls,
        num_tokens: int,
        attention: PieceAttention,
        cache: LayerCache,
        padding_rows: Sequence[int],
    ) -> _Buffers:
        """Buffers for steps of at most `num_tokens`, which are padding at first."""
        residual = attention.new_residual(num_tokens)
        padding = torch.tensor(padding_rows, device=residual.device).unsqueeze(1)
        columns = torch.zeros(
            1 + len(padding), num_tokens, dtype=torch.int64, device=residual.device
        )
        columns[1:] = padding
        queries = attention.queries(None, residual, _tokens(columns, cache.group), cache)
        attended = queries.new_zeros(num_tokens, attention.attended_width)
        return cls(residual, columns, queries.new_zeros(queries.shape), attended, padding)

    def load(self, residual: Tensor, batch: RaggedBatch, size: int) -> None:
        count = len(residual)
        self.residual[:count] = residual
        self.residual[count:size] = 0
        self.columns[0, :count] = batch.positions
        for row, group in enumerate((batch, *batch.windows), 1):
            self.columns[row, :count] = group.cache_rows
        self.columns[1:, count:size] = self.padding_rows


class PiecewiseLayers:
    """Layers with a PieceAttention. A step for which there are no pieces runs through `eager`."""

    def __init__(
        self,
        layers: Sequence[Layer],
        reduce: Reduce | None,
        eager: Layers,
        tapped: TappedModel | None = None,
    ) -> None:
        """A head reads hidden states of the `tapped` model."""
        self._attentions = [
            layer.attention for layer in layers if isinstance(layer.attention, PieceAttention)
        ]
        self._layers = layers
        self._reduce = reduce or _as_it_is
        self._eager, self._tapped = eager, tapped
        self._caches: Sequence[LayerCache] = ()
        self._pieces: dict[int, list[Captured]] = {}
        """By number of tokens, ascending."""
        self._buffers: _Buffers

    def allocate(
        self, num_tokens: int, caches: Sequence[LayerCache], padding_rows: Sequence[int]
    ) -> None:
        self._caches = caches
        self._buffers = _Buffers.allocate(num_tokens, self._attentions[0], caches[0], padding_rows)

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
        cache = self._caches[index]
        tokens = _tokens(buffers.columns[:, :size], cache.group)
        queries = attentions[index].queries(x, residual, tokens, cache)
        return buffers.queries[:size].copy_(queries)

    def run(self, size: int) -> None:
        """The work on `size` tokens without attention, which takes as many launches for each number of tokens."""
        for index in range(len(self._layers) + 1):
            self.piece(index, size)

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
        if index == len(counts) or batch.adapters is not None or batch.rotations is not None:
            return self._eager(residual, batch, caches)
        buffers, size = self._buffers, counts[index]
        buffers.load(residual, batch, size)
        *pieces, last = self._pieces[size]
        taps = () if self._tapped is None else self._tapped.taps
        copies: dict[int, Tensor] = {}
        for index, (piece, attention, cache) in enumerate(
            zip(pieces, self._attentions, caches, strict=True)
        ):
            piece.replay()
            if index in taps:
                # A piece begins with the sum of the layers before it.
                copies[index] = buffers.residual[:count].clone()
            group = batch.of_group(cache.group)
            buffers.attended[:count] = attention.attend(buffers.queries[:count], group, cache)
        x = last.replay()[:count]
        residual.copy_(buffers.residual[:count])
        if self._tapped is not None:
            copies[len(pieces)] = residual + x
            self._tapped.keep(torch.cat([copies[tap] for tap in taps], dim=1))
        return x


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
    tapped = model if isinstance(model, TappedModel) else None

    def make(layers: Sequence[Layer], reduce: Reduce | None) -> Layers:
        combine: MakeLayers = kernels.layers if tapped is None else tapped.tapped_layers
        eager = combine(layers, reduce)
        if not all(isinstance(layer.attention, PieceAttention) for layer in layers):
            return eager
        made.append(PiecewiseLayers(layers, reduce, eager, tapped))
        return made[0]

    piecewise = model.with_layers(make)
    if not made or not settings.may_capture(KIND):
        return model
    (layers,) = made
    padding_rows = [block * batch.limits.block_size for block in batch.limits.padding_blocks]
    if settings.large_pieces is None:
        layers.allocate(LARGE_TOKEN_COUNTS[0], cache, padding_rows)
        settings.large_pieces = tuple(_bound_by_launches(layers, settings, group))
    counts = (*settings.large_pieces, *TOKEN_COUNTS)
    layers.allocate(counts[0], cache, padding_rows)

    with trial_sequence(model, kernels, cache, batch) as trial:

        def compare(size: int, captured: list[Captured]) -> None:
            tokens = trial.last(size - 1, batch)
            layers.use({size: captured})
            replayed = _with_kept(tapped, piecewise.states(tokens, cache))
            layers.use({})
            eager = _with_kept(tapped, model.states(tokens, cache))
            for ours, theirs in zip(replayed, eager, strict=True):
                check_equal(ours, theirs, deterministic=kernels.deterministic)

        run = CaptureRun(KIND, settings, group, batch.device)
        layers.use(run.capture(counts, partial(layers.candidate, compare)))
    return piecewise


def _with_kept(tapped: TappedModel | None, states: Tensor) -> list[Tensor]:
    """`states` and what the last pass kept for a head, if there is one."""
    kept = None if tapped is None else tapped.take()
    return [states] if kept is None else [states, kept]


def _bound_by_launches(
    layers: PiecewiseLayers, settings: GraphSettings, group: ProcessGroup
) -> Iterator[int]:
    """The numbers in LARGE_TOKEN_COUNTS for which graphs are worth their memory. A collective."""
    for size in LARGE_TOKEN_COUNTS:
        try:
            is_bound = settings.outlast(partial(layers.run, size))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            is_bound = False
        if group.minimum(int(is_bound)):
            yield size


def _tokens(columns: Tensor, group: int) -> RaggedBatch:
    """Tokens at the positions and the group's cache rows in `columns`, for work that needs nothing else of a batch."""
    positions, cache_rows = columns[0], columns[1 + group]
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
