"""The agreement check: compiled kernels are used on a machine only if they agree with plain torch on a small case."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from millrace_shard.kernels.base import (
    AttentionWeights,
    Kernels,
    Layer,
    LayerCache,
    LinearWeights,
    MlpWeights,
)
from millrace_shard.kernels.blocks import ComposedBlocks
from millrace_shard.kernels.greedy import choose_greedy
from millrace_shard.kernels.masks import MaskTable, RowMasks
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.stored_weight import StoredWeight

QUERIES = (70, 1, 9)
CONTEXT = (70, 270, 300)
"""Longer than the longest chunk of keys of any kernels."""
NUM_HEADS = 4
NUM_KV_HEADS = 2
HIDDEN = 96
INTER = 816
"""Long enough for sums that are taken in parts."""
EPS = 1e-5
EVEN_IDS = 0x55555555
"""A word of a mask."""
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
    """The greatest difference of any output of `kernels` from `oracle`, relative to 1 + |oracle|; inf for NaN."""
    random = functools.partial(_Random, dtype, device)
    ours, theirs = (
        _attention(each, random(), head_dim=head_dim) + _row_operators(each, random())
        for each in (kernels, oracle)
    )
    if type(kernels).attention is not ComposedBlocks.attention:
        ours += _halves_of_a_layer(kernels, random(), head_dim=head_dim)
        theirs += _halves_of_a_layer(oracle, random(), head_dim=head_dim)
    logits = random()(3, 1003).float()
    ids, logprobs, _ = choose_greedy(logits)
    ours += [logits.gather(1, ids.unsqueeze(1)), logprobs]
    theirs += [logits.amax(1, keepdim=True), logits.log_softmax(1).amax(1)]
    masked, expected = _masked(logits)
    ours.append(masked)
    theirs.append(expected)
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
    """A batch of the last `num_queries` tokens of contexts of `num_context`, over unordered blocks; ids are 0."""
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
    """Random numbers that are the same on every device; each instance starts with the same seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.dtype = dtype
        self.device = device

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)


def _attention(kernels: Kernels, random: _Random, *, head_dim: int) -> list[Tensor]:
    """Rotated queries, attention, and attention with window and soft cap."""
    cache = _filled_cache(kernels, random, head_dim=head_dim)
    batch = _batch(kernels, random)
    queries = kernels.rope_store(
        random(sum(QUERIES), (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim),
        _rope(head_dim).to(random.device),
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


def _batch(kernels: Kernels, random: _Random) -> RaggedBatch:
    return ragged_batch(QUERIES, CONTEXT, block_size=kernels.block_size, device=random.device)


def _rope(head_dim: int) -> Tensor:
    angles = torch.arange(max(CONTEXT)).unsqueeze(1) / torch.arange(1, head_dim // 2 + 1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _filled_cache(kernels: Kernels, random: _Random, *, head_dim: int) -> LayerCache:
    """A cache with the keys and values of CONTEXT."""
    whole = ragged_batch(CONTEXT, CONTEXT, block_size=kernels.block_size, device=random.device)
    blocks = whole.block_tables.flatten().long()
    cache = kernels.new_cache(
        num_blocks=int(blocks.max()) + 1,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        dtype=random.dtype,
        device=random.device,
    )
    kernels.zero_blocks(cache, blocks)
    keys, values = (random(sum(CONTEXT), NUM_KV_HEADS, head_dim) for _ in range(2))
    kernels.store(keys, values, whole, cache)
    return cache


def _halves_of_a_layer(kernels: Kernels, random: _Random, *, head_dim: int) -> list[Tensor]:
    """The halves of a layer without and with all optional weights, separately and as a whole layer."""
    rows, outputs = sum(QUERIES), []
    batch, cache = _batch(kernels, random), _filled_cache(kernels, random, head_dim=head_dim)
    for optional in (False, True):
        attention = kernels.attention(_attention_weights(random, head_dim, optional=optional))
        mlp = kernels.mlp(_mlp_weights(random, optional=optional))
        residual = random(rows, HIDDEN)
        outputs.append(
            attention(random(rows, HIDDEN) if optional else None, residual, batch, cache)
        )
        outputs += [residual.clone(), mlp(random(rows, HIDDEN), residual), residual]
        embedded = random(rows, HIDDEN)
        layers = kernels.layers([Layer(attention, mlp)], None)
        outputs += [layers(embedded, batch, [cache]), embedded]
    return outputs


def _attention_weights(random: _Random, head_dim: int, *, optional: bool) -> AttentionWeights:
    return AttentionWeights(
        norm=1 + random(HIDDEN) / 8,
        eps=EPS,
        qkv=_linear(random, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, HIDDEN, bias=optional),
        query_norm=1 + random(head_dim) / 8 if optional else None,
        key_norm=1 + random(head_dim) / 8 if optional else None,
        out=_linear(random, HIDDEN, NUM_HEADS * head_dim, bias=optional),
        rope=_rope(head_dim).to(random.device),
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        window=66 if optional else None,
    )


def _mlp_weights(random: _Random, *, optional: bool) -> MlpWeights:
    return MlpWeights(
        norm=1 + random(HIDDEN) / 8,
        eps=EPS,
        gate_up=_linear(random, 2 * INTER, HIDDEN, bias=optional),
        down=_linear(random, HIDDEN, INTER, bias=optional),
    )


def _masked(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(`logits`) with two rows masked, by the mask table and by indexing; the last ids are past the mask."""
    words = logits.shape[1] // 32
    bits = torch.full((2, words), EVEN_IDS, dtype=torch.int32, device=logits.device)
    masked, expected = logits.clone(), logits.exp()
    masks = RowMasks(rows=np.array([2, 0]), bits=bits)
    MaskTable(logits.device).forbid(masked, masks, most_elements=logits.numel())
    for row in (0, 2):
        expected[row, 1::2] = expected[row, 32 * words :] = 0.0
    return masked.exp(), expected


def _linear(random: _Random, out: int, inputs: int, *, bias: bool) -> LinearWeights:
    weight = StoredWeight.of(random(out, inputs) / inputs**0.5)
    return LinearWeights(weight, random(out) / 4 if bias else None)


def _row_operators(kernels: Kernels, random: _Random) -> list[Tensor]:
    """Norms, linear, head and activation, over 1 and over 40 rows."""
    outputs = []
    for rows in (1, 40):
        x, residual, norm = random(rows, 144), random(rows, 144), random(144)
        linear = kernels.linear(random(80, 144) / 12, random(80))
        head = kernels.head(random(80, 144) / 12)
        outputs += [
            kernels.rms_norm(x, norm, EPS),
            kernels.add_rms_norm(x, residual, norm, EPS),
            residual,
            linear(x),
            head(x),
            kernels.silu_mul(random(rows, 288)),
        ]
    return outputs
