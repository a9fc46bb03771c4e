"""The agreement check of adapters: kernels apply them as plain torch does, and leave rows without one as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from millrace_shard.kernels.agreement import (
    CONTEXT,
    CPU,
    HIDDEN,
    INTER,
    NUM_HEADS,
    NUM_KV_HEADS,
    QUERIES,
    Random,
    attention_weights,
    distance,
    filled_cache,
    mlp_weights,
    ragged_batch,
)
from millrace_shard.kernels.base import Kernels, Layer, Layers, Linear
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.lora.adapter_table import (
    AdapterRows,
    AdapterTable,
    LoraPart,
    LoraSite,
    PackedAdapter,
    PackedPart,
    pack_part,
    running,
)

VOCAB = 80
SLOTS = (1, 0, 2)
"""The adapter slot of each sequence of the batch."""
RANKS = (5, 40)
"""The ranks of the adapters in slots 1 and 2, of one slice and of several."""


def adapter_difference(
    kernels: Kernels,
    oracle: Kernels,
    *,
    dtype: torch.dtype,
    head_dim: int,
    device: torch.device = CPU,
) -> float:
    """The greatest difference of a layer and a head with adapters from the same with `oracle`; see `distance`.

    It is inf if deterministic kernels change a bit of the rows without an adapter.
    """
    ours, theirs = (
        _Trial.build(each, Random(dtype, device), head_dim) for each in (kernels, oracle)
    )
    if kernels.deterministic:
        is_base = torch.from_numpy(ours.by_token == 0).to(device)
        pairs = zip(ours.outputs(adapted=True), ours.outputs(adapted=False), strict=True)
        if not all(torch.equal(with_[is_base], without[is_base]) for with_, without in pairs):
            return math.inf
    return distance(ours.outputs(adapted=True), theirs.outputs(adapted=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A layer and a head with two adapters."""

    kernels: Kernels
    table: AdapterTable
    layers: Layers
    head: Linear
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def build(cls, kernels: Kernels, random: Random, head_dim: int) -> _Trial:
        """With random weights, the same for all kernels."""
        table = AdapterTable(random.device)
        attention, mlp = (
            attention_weights(random, head_dim, optional=True),
            mlp_weights(random, optional=True),
        )
        queries, keys = NUM_HEADS * head_dim, NUM_KV_HEADS * head_dim
        qkv = _site(table, "qkv", HIDDEN, queries, keys, keys)
        out = _site(table, "o", queries, HIDDEN)
        gate_up, down = _site(table, "gu", HIDDEN, INTER, INTER), _site(table, "d", INTER, HIDDEN)
        layer = Layer(
            kernels.attention(
                replace(
                    attention,
                    qkv=replace(attention.qkv, lora=qkv),
                    out=replace(attention.out, lora=out),
                )
            ),
            kernels.mlp(
                replace(
                    mlp,
                    gate_up=replace(mlp.gate_up, lora=gate_up),
                    down=replace(mlp.down, lora=down),
                )
            ),
        )
        head = kernels.head(random(VOCAB, HIDDEN) / HIDDEN**0.5, _head_site(table))
        table.resize(len(RANKS))
        for slot, rank in enumerate(RANKS, 1):
            parts = _packed_parts(table, random, rank)
            table.put(slot, PackedAdapter(digest="", parts=parts, num_pages=0))
        return cls(
            kernels=kernels,
            table=table,
            layers=kernels.layers([layer], None),
            head=head,
            head_dim=head_dim,
            dtype=random.dtype,
        )

    @property
    def by_token(self) -> np.ndarray:
        """The adapter slot of each token."""
        return np.repeat(SLOTS, QUERIES)

    def outputs(self, *, adapted: bool) -> list[Tensor]:
        """Results of the layer and logits of all its rows, with and without adapters."""
        random = Random(self.dtype, self.table.device)
        kernels, device = self.kernels, self.table.device
        small = LayerShape.small(self.head_dim)
        cache = filled_cache(kernels, random, small, CONTEXT)
        batch = ragged_batch(QUERIES, CONTEXT, block_size=kernels.block_size, device=device)
        rows = AdapterRows.of(self.by_token, device) if adapted else None
        residual, states = random(sum(QUERIES), HIDDEN), random(sum(QUERIES), HIDDEN)
        with running(self.table, tokens=rows, logits=rows):
            x = self.layers(residual, replace(batch, adapters=rows), [cache])
            return [x, residual, self.head(states)]


def _site(table: AdapterTable, name: str, inputs: int, *outputs: int) -> LoraSite:
    return table.add_site(_parts(name, inputs, outputs))


def _head_site(table: AdapterTable) -> LoraSite:
    return table.add_site(_parts("head", HIDDEN, (VOCAB,)), is_head=True)


def _parts(name: str, inputs: int, outputs: tuple[int, ...]) -> list[LoraPart]:
    firsts = accumulate(outputs, initial=0)
    return [
        LoraPart(
            name=f"{name}{first}",
            inputs=inputs,
            outputs=size,
            input_range=(0, inputs),
            output_range=(0, size),
            first_output=first,
        )
        for first, size in zip(firsts, outputs, strict=False)
    ]


def _packed_parts(table: AdapterTable, random: Random, rank: int) -> dict[int, PackedPart]:
    """Every module with a bias, and with deltas of about a quarter of the results."""
    packed: dict[int, PackedPart] = {}
    for site in table.sites:
        pack = partial(pack_part, packing=site.packing, device=table.device)
        for index, part in enumerate(site.parts, site.first):
            packed[index] = pack(
                random(rank, part.inputs) / part.inputs**0.5,
                random(part.outputs, rank) / rank**0.5,
                random(rank).float() / 4,
                random(part.outputs).float() / 4,
            )
    return packed
