"""A model whose logits are a function of what it reads back from the paged KV cache.

It stores every token's id and position as key and value, and predicts from the whole context as the cache holds it.
A wrong block table, position, cache row or missing token changes what follows, and a stale NaN spoils it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.kernels.scores import SamplingKernels
from millrace_shard.models.interface import KVGeometry, KVLayer, MakeLayers, ModelInfo

VOCAB_SIZE = 97
EOS_TOKEN_ID = 96
BLOCK_SIZE = 4
MODULUS = 1_000_003


def context_hash(ids: Sequence[int]) -> int:
    """Depends on every id and its place."""
    value = 17
    for id_ in ids:
        value = (value * 31 + id_ + 7) % MODULUS
    return value


def logits_for(ids: Sequence[int], vocab_size: int = VOCAB_SIZE) -> Tensor:
    """[vocab] float32, what the fake predicts after `ids`."""
    steps = torch.arange(vocab_size, dtype=torch.float64)
    wave = torch.sin((context_hash(ids) + 1) * 0.37 + steps * steps * 1.7)
    return (wave * 4).to(torch.float32)


def greedy(ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that argmax yields after `ids`."""
    sequence = list(ids)
    for _ in range(count):
        sequence.append(int(logits_for(sequence).argmax()))
    return sequence[len(ids) :]


class FakeKernels:
    """The kernels that the engine itself calls; caches [num_blocks, BLOCK_SIZE, heads, dim] start as NaN."""

    name = "fake"
    operators: tuple[str, ...] = ()
    block_size = BLOCK_SIZE
    capturable = True
    key_tile = BLOCK_SIZE
    sampling: SamplingKernels | None = None
    deterministic = True

    def __init__(self) -> None:
        self.zeroed: list[list[int]] = []

    def new_cache(
        self,
        *,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: tuple[float, float] = (1.0, 1.0),
        latent_dim: int | None = None,
    ) -> LayerCache:
        """Every value NaN, as the worst that a freed block may hold."""
        shape = (num_blocks, BLOCK_SIZE, num_kv_heads, head_dim)
        keys = torch.full(shape, float("nan"), dtype=dtype, device=device)
        return LayerCache(keys, keys.clone())

    def zero_blocks(self, cache: LayerCache, blocks: Tensor) -> None:
        """Clear, and remember it."""
        self.zeroed.append(blocks.tolist())
        cache.keys[blocks] = 0
        cache.values[blocks] = 0

    def zero_layers(self, layers: Sequence[LayerCache], blocks: Sequence[Tensor]) -> None:
        """Layer by layer."""
        for layer in layers:
            self.zero_blocks(layer, blocks[layer.group])

    def zero_rows(self, cache: LayerCache, rows: Tensor, dtype: torch.dtype) -> None:
        """Clear positions."""
        for pages in (cache.keys, cache.values):
            pages.view(-1, *pages.shape[2:])[rows] = 0


def fake_kernels(fake: FakeKernels | None = None) -> Kernels:
    """The fake as what the engine takes; the rest of the interface is the model's alone."""
    return cast("Kernels", fake or FakeKernels())


class FakeModel:
    """Keys hold ids, values hold positions; `before_forward` may block, raise or look."""

    def __init__(self, *, max_position_embeddings: int = 64) -> None:
        self.info = ModelInfo(
            model_type="fake",
            vocab_size=VOCAB_SIZE,
            hidden_size=1,
            max_position_embeddings=max_position_embeddings,
            eos_token_ids=(EOS_TOKEN_ID,),
            window_size=None,
        )
        self.geometry = KVGeometry((KVLayer(1, 1),))
        self.before_forward: Callable[[RaggedBatch], None] = lambda batch: None
        self.poison: int | None = None
        """Sequences that contain this id yield NaN."""
        self.reads_cache = True
        """Whether logits follow from the cache; else they are 0, for rows that share a block that none has filled."""
        self.batches: list[RaggedBatch] = []
        self.num_logits: list[int] = []

    def forward(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """Store, then predict from what the block tables lead to."""
        self.batches.append(batch)
        self.before_forward(batch)
        if not self.reads_cache:
            return torch.zeros(len(batch.logit_rows), VOCAB_SIZE)
        keys, values = cache[0].keys.view(-1), cache[0].values.view(-1)
        keys[batch.cache_rows] = batch.ids.to(keys.dtype)
        values[batch.cache_rows] = batch.positions.to(values.dtype)
        logits = torch.empty(len(batch.logit_rows), VOCAB_SIZE)
        starts = batch.query_starts.tolist()
        for place, token in enumerate(batch.logit_rows.tolist()):
            row = max(b for b, start in enumerate(starts[:-1]) if start <= token)
            length = int(batch.positions[token]) + 1
            blocks = batch.block_tables[row].long()
            where = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).view(-1)
            # A masked weight of 0 still multiplies what lies past the end, as real kernels do.
            past = keys[where][length:].sum() * 0
            ids, positions = keys[where][:length], values[where][:length]
            assert torch.equal(positions, torch.arange(length, dtype=positions.dtype))
            context = [int(id_) for id_ in ids.tolist()]
            logits[place] = logits_for(context) + past
            if self.poison in context:
                logits[place, 3] = float("nan")
        return logits

    def first_layers(self, count: int) -> FakeModel:
        """It has but one."""
        return self

    def with_layers(self, make: MakeLayers) -> FakeModel:
        """It has no layer to combine."""
        return self

    def states(self, batch: RaggedBatch, cache: Sequence[LayerCache]) -> Tensor:
        """The logits themselves."""
        return self.forward(batch, cache)

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """Remember how many there are at a time."""
        self.num_logits.append(len(states))
        return states.clone()
