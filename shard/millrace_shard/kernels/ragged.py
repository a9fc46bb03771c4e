"""The tokens of one step: all sequences concatenated, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.states import StateRows


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """Tokens of a step whose embeddings are replaced."""

    tokens: Tensor
    """[n] int64, indexes of the step's tokens, each once."""
    values: Tensor
    """[n, hidden] in the dtype of the model, or [n, (1 + k) * hidden]: k first layers add one part each (deepstack)."""


class StepRotations(NamedTuple):
    """Rotations of a step's tokens that do not follow from `positions`."""

    table: Tensor
    """[T, rotary_dim] float32, as `Kernels.rope_store` takes it."""
    rows: Tensor
    """[T] int64: 0 … T - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """T tokens of B sequences. Prompt chunks and decodes are treated alike, as sequences of one or more queries.

    The tokens of sequence b are `query_starts[b] : query_starts[b + 1]`: the last `num_queries[b]` of its
    `num_context[b]` positions. A query sees its own and every earlier position, and later ones as `key_ends` says.
    """

    ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, absolute position of each token in its sequence."""
    cache_rows: Tensor
    """[T] int64, `block * block_size + offset`: where the token's key and value are stored."""
    query_starts: Tensor
    """[B + 1] int32."""
    context_lengths: Tensor
    """[B] int32, number of keys of each sequence, including this step's."""
    block_tables: Tensor
    """[B, max_blocks] int32, padded with block 0."""
    logit_rows: Tensor
    """[R] int64, the tokens whose logits are needed."""
    all_logits: bool = False
    """Whether `logit_rows` are all tokens, in order."""
    num_queries: tuple[int, ...]
    """The number of queries of each sequence, on the host."""
    num_context: tuple[int, ...]
    """`context_lengths` on the host; during graph capture, the number of keys that the block tables can hold."""
    adapters: AdapterRows | None = None
    """The adapters of the tokens; None if no token has one."""
    windows: tuple[RaggedBatch, ...] = ()
    """The same tokens with the cache rows and block tables of each window group."""
    states: StateRows | None = None
    """The states of the sequences; None if the model has no recurrent layer."""
    replaced: ReplacedRows | None = None
    """Tokens that stand for parts of images; None if there are none."""
    axes: Tensor | None = None
    """[3, T] int64, the position of each token on each axis of rotations; None: `positions` on all of them."""
    rotations: StepRotations | None = None
    """By `axes`; None if layers rotate by `positions`."""

    key_ends: Tensor | None = None
    """[T] int32, the position after the last one that each query sees, which rise within a sequence up to its
    context; None if each query is the last that it sees."""
    layer_inputs: Tensor | None = None
    """[T, layers, channels]: a further input of each layer, or of the first ones; None without any."""

    def rotated_by(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """The table of rotations [n, rotary_dim], and its row for each token [T]; `table` is the one for positions."""
        return (table, self.positions) if self.rotations is None else self.rotations

    def with_rotations(self, table: Tensor) -> RaggedBatch:
        """The same step, of all groups of layers, with a table [T, rotary_dim] for its tokens."""
        rows = torch.arange(len(self.ids), device=table.device)
        rotations = StepRotations(table, rows)
        windows = tuple(replace(each, rotations=rotations) for each in self.windows)
        return replace(self, rotations=rotations, windows=windows)

    def of_group(self, group: int) -> RaggedBatch:
        """The batch with the cache rows and block tables of a group of layers; 0 are those without a window group."""
        return self.windows[group - 1] if group else self

    @property
    def logit_adapters(self) -> AdapterRows | None:
        """The adapters of the rows whose logits are needed."""
        return None if self.adapters is None else self.adapters.logits

    def logit_states(self, x: Tensor) -> Tensor:
        """The rows of `x` [T, ...] whose logits are needed, [R, ...]."""
        return x if self.all_logits else x[self.logit_rows]


def with_windows(batch: RaggedBatch, windows: Sequence[tuple[Tensor, Tensor]]) -> RaggedBatch:
    """The batch with the cache rows [T] and block tables [B, max_blocks] of each window group."""
    if not windows:
        return batch
    groups = [
        replace(batch, cache_rows=rows, block_tables=tables, windows=()) for rows, tables in windows
    ]
    return replace(batch, windows=tuple(groups))


class ChunkedBatches:
    """Turns a step into one in which every query sees only keys in the same chunk of positions.

    A chunk of a sequence is a sequence whose first block is the chunk's.
    """

    def __init__(self, size: int, block_size: int) -> None:
        """`size` counts positions, and is a multiple of `block_size`."""
        self._size, self._block_size = size, block_size
        self._last: tuple[RaggedBatch, RaggedBatch] | None = None

    def __call__(self, batch: RaggedBatch) -> RaggedBatch:
        """All layers of a step have the same batch, so that its chunks are found once."""
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._chunked(batch)
        return self._last[1]

    def _chunked(self, batch: RaggedBatch) -> RaggedBatch:
        pieces = [
            (row, begin, start, min(context, begin + self._size))
            for row, (count, context) in enumerate(
                zip(batch.num_queries, batch.num_context, strict=True)
            )
            for begin, start in self._starts(context - count, context)
        ]
        device, tables = batch.block_tables.device, batch.block_tables
        width = max(-(-(end - begin) // self._block_size) for _, begin, _, end in pieces)
        own = tables.new_zeros(len(pieces), width)
        for piece, (row, begin, _, end) in enumerate(pieces):
            first, last = begin // self._block_size, -(-end // self._block_size)
            own[piece, : last - first] = tables[row, first:last]
        counts = tuple(end - start for _, _, start, end in pieces)
        contexts = tuple(end - begin for _, begin, _, end in pieces)
        starts = torch.tensor((0, *counts), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return replace(
            batch,
            query_starts=starts.to(device),
            context_lengths=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=own,
            num_queries=counts,
            num_context=contexts,
        )

    def _starts(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The first position of each chunk with queries from `first` to `end`, and of its queries."""
        for begin in range(first // self._size * self._size, end, self._size):
            yield begin, max(begin, first)
