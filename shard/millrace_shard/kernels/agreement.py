"""The agreement check: compiled kernels are used on a machine only if they agree with plain torch on a small case.

CPU kernels must pass this check, CUDA kernels the check in `cuda/served_agreement`, which includes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.kernels import experts_agreement
from millrace_shard.kernels.base import Kernels, Layer, LayerCache
from millrace_shard.kernels.layer_blocks import ComposedBlocks
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import (
    AttentionWeights,
    HeadNorms,
    LinearWeights,
    MlpWeights,
    NormWeights,
    Rotation,
)
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.scores import MaskTable, RowMasks, choose_greedy
from millrace_shard.kernels.stored_weight import StoredWeight

QUERIES = (70, 1, 9)
CONTEXT = (70, 270, 300)
"""Longer than the longest chunk of keys of any kernels."""
NUM_HEADS = 4
NUM_KV_HEADS = 2
HIDDEN = 96
HEAD_OUTPUTS = 64
INTER = 816
"""Long enough for sums that are taken in parts."""
EPS = 1e-5
EVEN_IDS = 0x55555555
"""A word of a mask."""
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004, torch.float32: 1e-4}
SCALES = (0.03, 0.02)
"""Of keys and values in fp8, whose largest codes are used then, and some saturate."""
CPU = torch.device("cpu")


def largest_difference(
    kernels: Kernels,
    oracle: Kernels,
    *,
    dtype: torch.dtype,
    shape: LayerShape,
    device: torch.device = CPU,
) -> float:
    """The greatest difference of any output of `kernels` from `oracle`; see `distance`."""
    random = functools.partial(Random, dtype, device)
    attend = _attention if shape.latent_dim is None else _latent_attention
    ours, theirs = (
        attend(each, random(), shape) + _row_operators(each, random()) for each in (kernels, oracle)
    )
    has_halves = type(kernels).attention is not ComposedBlocks.attention
    if has_halves and shape.latent_dim is None:
        ours += _halves_of_a_layer(kernels, random(), shape)
        theirs += _halves_of_a_layer(oracle, random(), shape)
    if shape.experts and type(kernels).experts is not ComposedBlocks.experts:
        ours += experts_agreement.outputs(kernels, random(), dtype)
        theirs += experts_agreement.outputs(oracle, random(), dtype)
    logits = random()(3, 1003).float()
    ids, logprobs, _ = choose_greedy(logits)
    ours += [logits.gather(1, ids.unsqueeze(1)), logprobs]
    theirs += [logits.amax(1, keepdim=True), logits.log_softmax(1).amax(1)]
    masked, expected = _masked(logits)
    ours.append(masked)
    theirs.append(expected)
    return distance(ours, theirs)


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The greatest difference of an element of `ours` from `theirs`, relative to 1 + |theirs|; inf for NaN."""
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
    tables_of: Sequence[int] | None = None,
) -> RaggedBatch:
    """A batch of the last `num_queries` tokens of contexts of `num_context`, over unordered blocks; ids are 0.

    With `tables_of`, the sequences are the last ones of a longer list of contexts, and have their blocks in it.
    """
    tables = _tables(tables_of or num_context, block_size)[-len(num_context) :]
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


def _tables(contexts: Sequence[int], block_size: int) -> Tensor:
    """Block tables of `contexts`, padded with block 0, over blocks from 1 on in descending order."""
    counts = [-(-length // block_size) for length in contexts]
    blocks = list(torch.split(torch.arange(sum(counts), 0, -1), counts))
    return torch.nn.utils.rnn.pad_sequence(blocks, batch_first=True)


class Random:
    """Random numbers, made on the device: a host takes seconds for long contexts. Each instance has the same seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype
        self.device = device

    def __call__(self, *shape: int) -> Tensor:
        """The next numbers of a normal distribution."""
        made = torch.randn(shape, generator=self._generator, device=self.device)
        return made.to(self.dtype)


def _attention(kernels: Kernels, random: Random, shape: LayerShape) -> list[Tensor]:
    """Queries that are rotated, without and with norms of heads, and every kind of attention."""
    head_dim, outputs = shape.head_dim, []
    cache = filled_cache(kernels, random, shape, CONTEXT)
    batch = _batch(kernels, random)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    rope = rope_table(head_dim, max(CONTEXT)).to(random.device)
    normed = _head_norms(random, head_dim)
    sinks = random(shape.num_heads).float() if shape.has_sinks else None
    for norms, kinds in ((None, shape.kinds), (normed, shape.kinds[:1])):
        queries = kernels.rope_store(
            random(sum(QUERIES), width),
            rope,
            batch,
            cache,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            norms=norms,
        )
        outputs.append(queries)
        attend = functools.partial(kernels.attend, queries, batch, cache, scale=head_dim**-0.5)
        outputs += [attend(window=window, softcap=softcap) for window, softcap in kinds]
        if sinks is not None:
            outputs += [attend(window=window, sinks=sinks) for window, _ in kinds]
    return outputs


def _latent_attention(kernels: Kernels, random: Random, shape: LayerShape) -> list[Tensor]:
    """Attention over latents, and a linear for each head over its results."""
    assert shape.latent_dim is not None
    cache = filled_cache(kernels, random, shape, CONTEXT)
    # As prepared: the key is stored behind the queries.
    heads = random(sum(QUERIES), shape.num_heads + 1, shape.head_dim)
    scale = shape.head_dim**-0.5
    attended = kernels.attend(heads[:, :-1], _batch(kernels, random), cache, scale=scale)
    sums = attended.view(len(heads), shape.num_heads, shape.latent_dim)
    weight = random(shape.num_heads, HEAD_OUTPUTS, shape.latent_dim) / shape.latent_dim**0.5
    results = random(*sums.shape[:2], HEAD_OUTPUTS)
    kernels.heads_linear(weight)(sums, results)
    return [attended, results]


def _batch(kernels: Kernels, random: Random) -> RaggedBatch:
    return ragged_batch(QUERIES, CONTEXT, block_size=kernels.block_size, device=random.device)


def rope_table(head_dim: int, num_positions: int) -> Tensor:
    angles = torch.arange(num_positions).unsqueeze(1) / torch.arange(1, head_dim // 2 + 1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def filled_cache(
    kernels: Kernels, random: Random, shape: LayerShape, contexts: Sequence[int]
) -> LayerCache:
    """A cache with random keys and values for the tables of `ragged_batch`."""
    whole = ragged_batch(contexts, contexts, block_size=kernels.block_size, device=random.device)
    blocks = whole.block_tables.flatten().long()
    cache = kernels.new_cache(
        num_blocks=int(blocks.max()) + 1,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=shape.cache_dtype or random.dtype,
        device=random.device,
        scales=SCALES,
        latent_dim=shape.latent_dim,
    )
    kernels.zero_blocks(cache, blocks)
    keys, values = (random(sum(contexts), shape.num_kv_heads, shape.head_dim) for _ in range(2))
    kernels.store(keys, values, whole, cache)
    return cache


def _halves_of_a_layer(kernels: Kernels, random: Random, shape: LayerShape) -> list[Tensor]:
    """The halves of a layer without and with all optional weights, and as in gpt-oss, separately and as a layer."""
    rows, outputs = sum(QUERIES), []
    head_dim = shape.head_dim
    small = LayerShape.small(head_dim, shape.cache_dtype)
    batch, cache = _batch(kernels, random), filled_cache(kernels, random, small, CONTEXT)
    usual, full = (attention_weights(random, head_dim, optional=each) for each in (False, True))
    assert full.norm is not None
    sinks = random(NUM_HEADS).float()
    gpt_oss = replace(full, norm=replace(full.norm, wide=True), head_norms=None, sinks=sinks)
    for optional, weights in ((False, usual), (True, full), (True, gpt_oss)):
        attention = kernels.attention(weights)
        mlp = kernels.mlp(mlp_weights(random, optional=optional, wide=weights is gpt_oss))
        residual = random(rows, HIDDEN)
        outputs.append(
            attention(random(rows, HIDDEN) if optional else None, residual, batch, cache)
        )
        outputs += [residual.clone(), mlp(random(rows, HIDDEN), residual), residual]
        embedded = random(rows, HIDDEN)
        layers = kernels.layers([Layer(attention, mlp)], None)
        outputs += [layers(embedded, batch, [cache]), embedded]
    return outputs


def attention_weights(random: Random, head_dim: int, *, optional: bool) -> AttentionWeights:
    """Random weights, with biases, norms of heads and a window if `optional`."""
    return AttentionWeights(
        norm=NormWeights(weight=1 + random(HIDDEN) / 8, eps=EPS),
        qkv=_linear(random, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim, HIDDEN, bias=optional),
        head_norms=_head_norms(random, head_dim) if optional else None,
        out=_linear(random, HIDDEN, NUM_HEADS * head_dim, bias=optional),
        rotation=Rotation(table=rope_table(head_dim, max(CONTEXT)).to(random.device)),
        scale=head_dim**-0.5,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=head_dim,
        window=66 if optional else None,
    )


def _head_norms(random: Random, head_dim: int) -> HeadNorms:
    query, key = (NormWeights(weight=1 + random(head_dim) / 8, eps=EPS) for _ in range(2))
    return HeadNorms(query=query, key=key)


def mlp_weights(random: Random, *, optional: bool, wide: bool = False) -> MlpWeights:
    return MlpWeights(
        norm=NormWeights(weight=1 + random(HIDDEN) / 8, eps=EPS, wide=wide),
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


def _linear(random: Random, out: int, inputs: int, *, bias: bool) -> LinearWeights:
    weight = StoredWeight.of(random(out, inputs) / inputs**0.5)
    return LinearWeights(weight, random(out) / 4 if bias else None)


def _row_operators(kernels: Kernels, random: Random) -> list[Tensor]:
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
