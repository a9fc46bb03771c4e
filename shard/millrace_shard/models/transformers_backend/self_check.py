"""The check of a class that is not on the list: our logits of a few tokens against the unchanged class's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.interface import CausalModel, KVLayer
from millrace_shard.models.transformers_backend.paged_attention import NAME
from millrace_shard.models.transformers_backend.supported import refusing_errors_of

NUM_TOKENS = 24
IN_PARTS = "as states and then logits"
CHUNKS: dict[str, tuple[int, ...]] = {
    "as a whole": (24,),
    "in chunks": (9, 7, 4, 1, 1, 1, 1),
    IN_PARTS: (24,),
}
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""The largest root mean square difference of a token's logits, as a share of their spread."""
OTHER_EXPERTS = {torch.float32: 0, torch.bfloat16: 3, torch.float16: 3}
"""Tokens that may differ by more, since rounding may route them to other experts: fewer than those computed alone."""
QUANTIZED_TOLERANCE = 0.25
"""The same for linears that are quantised as they are loaded."""


def tokens_of(vocab_size: int, seed: int = 0) -> Tensor:
    """[NUM_TOKENS] int64, random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (NUM_TOKENS,), generator=generator)


@torch.inference_mode()
def eager_logits(model: PreTrainedModel) -> Tensor:
    """Logits [NUM_TOKENS, vocab] float32 by only the class's own code, which must not have been changed yet.

    Raises UnsupportedModel if that code fails.
    """
    model.set_attn_implementation("eager")
    try:
        with refusing_errors_of(f"{type(model).__name__} does not run by itself"):
            output = model.eval()(
                input_ids=tokens_of(model.config.vocab_size).unsqueeze(0), use_cache=False
            )
    finally:
        model.set_attn_implementation(NAME)
    logits: Tensor = output.logits[0]
    return logits.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheck:
    """Runs a model over separate paged caches."""

    kernels: Kernels
    group: ProcessGroup
    dtype: torch.dtype
    device: torch.device
    tolerance: float

    def run(self, model: CausalModel, expected: Tensor | None) -> dict[str, float]:
        """Compare `model` with the `expected` logits on rank 0; other ranks have None. A collective.

        Returns the distances, and raises UnsupportedModel on every rank, naming the comparison, if one exceeds the
        tolerance.
        """
        distances = {}
        for name, chunks in CHUNKS.items():
            logits = torch.cat(list(self._logits(model, chunks, in_parts=name == IN_PARTS)))
            distance = (
                0.0
                if expected is None
                else _distance(logits.cpu(), expected, OTHER_EXPERTS[self.dtype])
            )
            # Written so that NaN fails.
            if not self.group.minimum(int(distance <= self.tolerance)):
                distance_text = "" if expected is None else f" by {distance:.2g} of their spread"
                raise UnsupportedModel(
                    f"{model.info.model_type} fails the self-check in {self.dtype}: logits of {NUM_TOKENS} tokens "
                    f"computed {name} over the paged cache differ from its own eager attention's{distance_text}; "
                    f"at most {self.tolerance:g} is allowed"
                )
            distances[name] = distance
        return distances

    def _logits(
        self, model: CausalModel, chunks: Sequence[int], *, in_parts: bool
    ) -> Iterator[Tensor]:
        """Logits of each chunk, computed with a chunk of other tokens."""
        size = self.kernels.block_size
        blocks = -(-NUM_TOKENS // size)
        caches = [self._cache(layer, 2 * blocks + 1) for layer in model.geometry.layers]
        vocab_size = model.info.vocab_size
        # The blocks of the two sequences alternate, and block 0 is never used.
        tables = torch.tensor(
            [range(first, 2 * blocks + 1, 2) for first in (1, 2)], dtype=torch.int32
        )
        ids = torch.stack([tokens_of(vocab_size, seed=1), tokens_of(vocab_size)])
        start = 0
        for count in chunks:
            batch = self._batch(ids, tables, start, count)
            if in_parts:
                yield model.logits(model.states(batch, caches))[count:]
            else:
                yield model.forward(batch, caches)[count:]
            start += count

    def _cache(self, layer: KVLayer, num_blocks: int) -> LayerCache:
        cache = layer.new_cache(self.kernels, num_blocks, self.dtype, self.device)
        self.kernels.zero_blocks(cache, torch.arange(num_blocks, device=self.device))
        return cache

    def _batch(self, ids: Tensor, tables: Tensor, start: int, count: int) -> RaggedBatch:
        """Tokens `start` to `start + count` of both sequences of `ids` [2, NUM_TOKENS]."""
        size, device = self.kernels.block_size, self.device
        positions = torch.arange(start, start + count)
        rows = tables[:, positions // size].long() * size + positions % size
        context = start + count
        return RaggedBatch(
            ids=ids[:, start:context].flatten().to(device),
            positions=positions.repeat(2).to(device),
            cache_rows=rows.flatten().to(device),
            query_starts=torch.tensor((0, count, 2 * count), dtype=torch.int32, device=device),
            context_lengths=torch.full((2,), context, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            logit_rows=torch.arange(2 * count, device=device),
            num_queries=(count, count),
            num_context=(context, context),
        )


def _distance(actual: Tensor, expected: Tensor, num_exempt: int) -> float:
    """The largest difference of a row of logits [T, vocab], as a share of the row's spread, but for some rows."""
    if not actual.isfinite().all():
        return math.inf
    spread = (expected - expected.mean(-1, keepdim=True)).square().mean(-1).sqrt()
    distances = (actual - expected).square().mean(-1).sqrt() / spread
    return float(distances.sort(descending=True).values[num_exempt])
