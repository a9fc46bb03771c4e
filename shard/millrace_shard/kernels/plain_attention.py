"""Ragged paged attention in plain torch, in two versions: fast, and with one fixed shape for every product.

Shapes: T tokens, H query heads, K key-value heads, G = H / K query heads per key-value head, D head_dim, C keys.
Values past the end of a sequence are replaced by zeros before they are multiplied, since 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.base import LayerCache
from millrace_shard.kernels.kv_cache import read_blocks
from millrace_shard.kernels.ragged import RaggedBatch

QUERY_TILE = 16
"""Queries per product in deterministic mode; divides KEY_CHUNK, so that a tile lies within one key chunk."""
KEY_CHUNK = 128
SCORE_QUERIES = 128
"""Queries per product where scores are materialised."""
SINGLES_ELEMENTS = 1 << 25
"""Elements of keys to gather at a time for single queries; a longer context is processed by itself."""


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Scale, window, soft cap and sinks, which turn products of queries and keys into attention weights."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None
    """[H] float32: a score of each head that takes part in the softmax without a value."""

    def scores(self, products: Tensor) -> Tensor:
        scores = products * self.scale
        if self.softcap is None:
            return scores
        return torch.tanh(scores / self.softcap) * self.softcap

    def softmax(self, scores: Tensor) -> Tensor:
        """The weights of `scores` [..., K, rows, C] float32, with the rows of whole heads, as in `_fold_heads`."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sink_rows(scores.shape[-3], scores.shape[-2])
        sinks = sinks.expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]

    def sink_rows(self, num_kv_heads: int, rows: int) -> Tensor:
        """The sink of the head of each row, [K, rows, 1]; there have to be sinks."""
        assert self.sinks is not None
        sinks = self.sinks.view(num_kv_heads, -1, 1)
        return sinks.repeat_interleave(rows // sinks.shape[1], dim=1)

    def sees(
        self, query_positions: Tensor, key_positions: Tensor, ends: Tensor | None = None
    ) -> Tensor:
        """Whether each query (second to last axis) sees each key (last axis), up to its end if there are `ends`."""
        distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
        seen = distance >= 0 if ends is None else key_positions < ends.unsqueeze(-1)
        return seen if self.window is None else seen & (distance < self.window)

    def first_key(self, query_position: int) -> int:
        """The first key that a query sees."""
        return 0 if self.window is None else max(0, query_position - self.window + 1)

    def span(self, context: int, block_size: int) -> int:
        """The maximal number of keys, from the start of a block on, that the last query of a context sees."""
        return context if self.window is None else min(context, self.window + block_size - 1)


def attend_whole(queries: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """Attention of all queries to all keys, [N, H, D] each: [N, H * D]."""
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        scale=scale,
    )
    return attended[0].transpose(0, 1).flatten(1)


def attend_fast(queries: Tensor, batch: RaggedBatch, cache: LayerCache, rule: ScoreRule) -> Tensor:
    """Attend single queries in groups of similar contexts, and every longer run of queries by itself: [T, H * D]."""
    out = _new_outputs(queries, cache)
    singles = [b for b, count in enumerate(batch.num_queries) if count == 1]
    for group in _groups_of_singles(singles, batch.num_context, cache, rule):
        rows = torch.tensor(group, device=queries.device)
        tokens = batch.query_starts[rows].long()
        longest = batch.num_context[group[-1]]
        out[tokens] = _attend_singles(
            queries[tokens], batch, cache, rule, rows=rows, longest=longest
        )
    start = 0
    for sequence, count in enumerate(batch.num_queries):
        if count > 1:
            run = slice(start, start + count)
            ends = None if batch.key_ends is None else batch.key_ends[run]
            out[run] = _attend_run(queries[run], batch, cache, rule, sequence=sequence, ends=ends)
        start += count
    return out.flatten(1)


def attend_fixed(queries: Tensor, batch: RaggedBatch, cache: LayerCache, rule: ScoreRule) -> Tensor:
    """Attend by query tiles and key chunks on a grid of absolute positions, with online softmax in float32: [T, H * D].

    The place of a query in its tile, and the chunks and their order, depend only on its position.
    """
    out = _new_outputs(queries, cache)
    start = 0
    for sequence, count in enumerate(batch.num_queries):
        context = batch.num_context[sequence]
        first = context - count
        chunks = _KeyChunks(batch.block_tables[sequence], cache, context)
        for tile in range(first // QUERY_TILE * QUERY_TILE, context, QUERY_TILE):
            begin, end = max(tile, first), min(tile + QUERY_TILE, context)
            rows = slice(start + begin - first, start + end - first)
            padding = (0, 0, 0, 0, begin - tile, tile + QUERY_TILE - end)
            ends = None if batch.key_ends is None else F.pad(batch.key_ends[rows], padding[4:])
            attended = _attend_tile(F.pad(queries[rows], padding), tile, ends, chunks, rule)
            out[rows] = attended[begin - tile : end - tile]
        start += count
    return out.flatten(1)


def _new_outputs(queries: Tensor, cache: LayerCache) -> Tensor:
    """[T, H, D], or [T, H, latent_dim]."""
    width = queries.shape[2] if cache.latent_dim is None else cache.latent_dim
    return queries.new_empty(*queries.shape[:2], width)


class _KeyChunks:
    """Keys and values of one sequence in chunks of KEY_CHUNK, [K, C, D] float32, zero past its end."""

    def __init__(self, blocks: Tensor, cache: LayerCache, context: int) -> None:
        self._blocks = blocks
        self._cache = cache
        self._context = context
        self._chunks: dict[int, tuple[Tensor, Tensor]] = {}

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        if start not in self._chunks:
            end = min(start + KEY_CHUNK, self._context)
            keys, values = self._read(start, end)
            self._chunks[start] = keys, values
        return self._chunks[start]

    def _read(self, start: int, end: int) -> Iterator[Tensor]:
        block_size = self._cache.keys.shape[1]
        blocks = self._blocks[start // block_size : -(-end // block_size)]
        padding = (0, 0, 0, 0, 0, KEY_CHUNK - (end - start))
        for each in read_blocks(self._cache, blocks):
            rows = each.flatten(0, 1)[: end - start].float()
            yield F.pad(rows, padding).transpose(0, 1).contiguous()


def _attend_tile(
    queries: Tensor, tile: int, ends: Tensor | None, chunks: _KeyChunks, rule: ScoreRule
) -> Tensor:
    """Attend `queries` [QUERY_TILE, H, D] at positions from `tile` on; the results of padding rows are undefined."""
    num_heads = queries.shape[1]
    positions = torch.arange(tile, tile + QUERY_TILE, device=queries.device)
    num_kv_heads = chunks[tile // KEY_CHUNK * KEY_CHUNK][0].shape[0]
    grouped = _fold_heads(queries.float(), num_kv_heads)
    size = grouped.shape[:2]
    if rule.sinks is None:
        top, total = grouped.new_full((*size, 1), -torch.inf), grouped.new_zeros(*size, 1)
    else:
        top, total = rule.sink_rows(*size), grouped.new_ones(*size, 1)
    out = grouped.new_zeros(*size, chunks[tile // KEY_CHUNK * KEY_CHUNK][1].shape[2])
    first = rule.first_key(tile) // KEY_CHUNK * KEY_CHUNK
    last = tile + 1 if ends is None else int(ends.max())
    for start in range(first, last, KEY_CHUNK):
        keys, values = chunks[start]
        key_positions = torch.arange(start, start + KEY_CHUNK, device=queries.device)
        hidden = ~rule.sees(positions, key_positions, ends).repeat(num_heads // num_kv_heads, 1)
        scores = rule.scores(grouped @ keys.transpose(1, 2)).masked_fill(hidden, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # The maximum of a row without a visible key is minus infinity, and is not subtracted.
        shift = new_top.masked_fill(new_top == -torch.inf, 0)
        weights = torch.exp(scores - shift)
        carried = torch.exp(top - shift)
        total = total * carried + weights.sum(-1, keepdim=True)
        out = out * carried + weights @ values
        top = new_top
    return _unfold_heads((out / total).to(queries.dtype), QUERY_TILE)


def _groups_of_singles(
    singles: list[int], num_context: Sequence[int], cache: LayerCache, rule: ScoreRule
) -> Iterator[list[int]]:
    """Groups of sequences with similar contexts, the longest last, with at most SINGLES_ELEMENTS of padded keys."""
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    group: list[int] = []
    for b in sorted(singles, key=num_context.__getitem__):
        num_blocks = -(-rule.span(num_context[b], block_size) // block_size)
        keys = num_blocks * block_size * num_kv_heads * head_dim
        if group and (len(group) + 1) * keys > SINGLES_ELEMENTS:
            yield group
            group = []
        group.append(b)
    if group:
        yield group


def _attend_singles(
    queries: Tensor,
    batch: RaggedBatch,
    cache: LayerCache,
    rule: ScoreRule,
    *,
    rows: Tensor,
    longest: int,
) -> Tensor:
    """Attend one query of each sequence in `rows`, [R, H, D]; `longest` is the longest of their contexts."""
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    last = batch.context_lengths[rows].long().unsqueeze(1) - 1
    num_columns = -(-rule.span(longest, block_size) // block_size)
    columns = torch.arange(num_columns, device=queries.device)
    if rule.window is None:
        columns = columns.expand(len(rows), -1)
    else:
        columns = columns + (last - rule.window + 1).clamp(min=0) // block_size
    table = batch.block_tables[rows]
    blocks = table.gather(1, columns.clamp(max=table.shape[1] - 1))
    offsets = torch.arange(block_size, device=queries.device)
    positions = (columns.unsqueeze(-1) * block_size + offsets).flatten(1)
    seen = rule.sees(last, positions)
    keys, values = (each.flatten(1, 2) for each in read_blocks(cache, blocks))
    keys = keys.permute(0, 2, 3, 1).float()
    values = values.masked_fill(~seen[:, 0, :, None, None], 0)
    grouped = queries.view(len(rows), num_kv_heads, -1, head_dim).float()
    scores = rule.scores(grouped @ keys).masked_fill(~seen.unsqueeze(1), -torch.inf)
    attended = rule.softmax(scores) @ values.transpose(1, 2).float()
    return attended.to(queries.dtype).view(*queries.shape[:2], -1)


def _attend_run(
    queries: Tensor,
    batch: RaggedBatch,
    cache: LayerCache,
    rule: ScoreRule,
    *,
    sequence: int,
    ends: Tensor | None,
) -> Tensor:
    """Attend the last queries of one sequence, [n, H, D]; `ends` [n] is where the keys of each end."""
    count, context = queries.shape[0], batch.num_context[sequence]
    block_size = cache.keys.shape[1]
    first = rule.first_key(context - count) // block_size * block_size
    blocks = batch.block_tables[sequence, first // block_size : -(-context // block_size)]
    keys, values = (
        each.flatten(0, 1)[: context - first].transpose(0, 1) for each in read_blocks(cache, blocks)
    )
    positions = torch.arange(context - count, context, device=queries.device)
    seen = rule.sees(positions, torch.arange(first, context, device=queries.device), ends)
    if rule.softcap is None and rule.sinks is None:
        attended = F.scaled_dot_product_attention(
            queries.to(keys.dtype).transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=seen,
            scale=rule.scale,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1).to(queries.dtype)
    tiles = []
    for tile, tile_seen in zip(
        torch.split(queries, SCORE_QUERIES), torch.split(seen, SCORE_QUERIES), strict=True
    ):
        grouped = _fold_heads(tile.float(), keys.shape[0])
        hidden = ~tile_seen.repeat(grouped.shape[1] // tile.shape[0], 1)
        scores = rule.scores(grouped @ keys.float().transpose(1, 2)).masked_fill(hidden, -torch.inf)
        tiles.append(_unfold_heads(rule.softmax(scores) @ values.float(), tile.shape[0]))
    return torch.cat(tiles).to(queries.dtype)


def _fold_heads(queries: Tensor, num_kv_heads: int) -> Tensor:
    """[n, H, D] to [K, G * n, D]: heads that share keys become rows of one product."""
    return queries.transpose(0, 1).reshape(num_kv_heads, -1, queries.shape[2])


def _unfold_heads(attended: Tensor, count: int) -> Tensor:
    """[K, G * n, D] back to [n, H, D]."""
    return attended.reshape(-1, count, attended.shape[-1]).transpose(0, 1)
