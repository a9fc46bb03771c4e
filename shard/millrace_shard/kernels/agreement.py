"""A small case run through two kernels: compiled ones are trusted on a machine only after they agree with plain."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.ragged import RaggedBatch

QUERIES = (70, 1, 9)
CONTEXT = (70, 5, 140)
NUM_HEADS = 4
NUM_KV_HEADS = 2
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-4}
CPU = torch.device("cpu")


def largest_difference(
    kernels: Kernels,
    oracle: Kernels,
    *,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device = CPU,
) -> float:
    """Greatest distance of any output of `kernels` from `oracle`, in parts of 1 + its size; inf for NaN."""
    random = functools.partial(_Random, dtype, device)
    ours, theirs = (
        _attention(each, random(), head_dim=head_dim) + _row_operators(each, random())
        for each in (kernels, oracle)
    )
    distances = [
        ((a.float() - b.float()).abs() / (1 + b.float().abs())).max()
        for a, b in zip(ours, theirs, strict=True)
    ]
    return float(torch.stack(distances).nan_to_num(nan=torch.inf).max())


def ragged_batch(
    num_queries: Sequence[int],
    num_context: Sequence[int],
    *,
    block_size: int,
    device: torch.device = CPU,
) -> RaggedBatch:
    """The last `num_queries` tokens of sequences of `num_context`, over blocks that are not in order; ids are 0."""
    num_blocks = -(-max(num_context) // block_size)
    tables = torch.arange(len(num_queries) * num_blocks).flip(0).view(-1, num_blocks) + 1
    spans = [
        torch.arange(end - count, end) for count, end in zip(num_queries, num_context, strict=True)
    ]
    starts = torch.tensor([0, *num_queries]).cumsum(0)
    return RaggedBatch(
        ids=torch.zeros(sum(num_queries), dtype=torch.int64, device=device),
        positions=torch.cat(spans).to(device),
        cache_rows=torch.cat(
            [
                blocks[span // block_size] * block_size + span % block_size
                for blocks, span in zip(tables, spans, strict=True)
            ]
        ).to(device),
        query_starts=starts.int().to(device),
        context_lengths=torch.tensor(num_context, dtype=torch.int32, device=device),
        block_tables=tables.int().to(device),
        logit_rows=(starts[1:] - 1).to(device),
        num_queries=tuple(num_queries),
        num_context=tuple(num_context),
    )


class _Random:
    """The same numbers on every device, and for every kernels that start anew."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.device = device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)


def _attention(kernels: Kernels, random: _Random, *, head_dim: int) -> list[Tensor]:
    """Rotated queries, then attention without and with window and cap."""
    size, device = kernels.block_size, random.device
    whole = ragged_batch(CONTEXT, CONTEXT, block_size=size, device=device)
    cache = _zeroed_cache(kernels, whole, random, head_dim=head_dim)
    keys, values = (random(sum(CONTEXT), NUM_KV_HEADS, head_dim) for _ in range(2))
    kernels.store(keys, values, whole, cache)
    batch = ragged_batch(QUERIES, CONTEXT, block_size=size, device=device)
    angles = torch.arange(max(CONTEXT)).unsqueeze(1) / torch.arange(1, head_dim // 2 + 1)
    queries = kernels.rope_store(
        random(sum(QUERIES), (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim),
        torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        batch,
        cache,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
    )
    scale = head_dim**-0.5
    return [
        queries,
        kernels.attend(queries, batch, cache, scale=scale),
        kernels.attend(queries, batch, cache, scale=scale, window=66, softcap=3.0),
    ]


def _zeroed_cache(
    kernels: Kernels, batch: RaggedBatch, random: _Random, *, head_dim: int
) -> LayerCache:
    blocks = batch.block_tables.flatten().long()
    cache = kernels.new_cache(
        num_blocks=int(blocks.max()) + 1,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        dtype=random.dtype,
        device=random.device,
    )
    kernels.zero_blocks(cache, blocks)
    return cache


def _row_operators(kernels: Kernels, random: _Random) -> list[Tensor]:
    """Norms, linear and activation of 1 and of 40 rows."""
    outputs = []
    for rows in (1, 40):
        x, residual, norm = random(rows, 144), random(rows, 144), random(144)
        linear = kernels.linear(random(80, 144) / 12, random(80))
        outputs += [
            kernels.rms_norm(x, norm, 1e-5),
            kernels.add_rms_norm(x, residual, norm, 1e-5),
            residual,
            linear(x),
            kernels.silu_mul(random(rows, 288)),
        ]
    return outputs
