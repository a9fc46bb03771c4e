"""How the sequences of a loaded model are guessed ahead, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace_shard.batch.batch import Batch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.draft_model import DraftProposer
from millrace_shard.speculation.medusa import MedusaModel, MedusaProposer
from millrace_shard.speculation.ngrams import CopyingNgramProposer, NgramProposer
from millrace_shard.speculation.proposer import Proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """By a draft model or Medusa heads where there are any, else by n-grams."""

    most: int
    """Guesses per sequence and step, at least 1."""
    draft: CausalModel | None = None

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(num_kv_heads, head_dim) of each layer that needs a KV cache beside the model's."""
        return () if self.draft is None else self.draft.geometry.layers

    def proposer(
        self,
        model: CausalModel,
        kernels: Kernels,
        cache: list[LayerCache],
        batch: Batch,
        dtype: torch.dtype,
    ) -> Proposer:
        """For the sequences of `batch`, which `model` runs; `cache` is that of `layers`."""
        if self.draft is not None:
            return DraftProposer(self.draft, kernels, cache, batch)
        if isinstance(model, MedusaModel):
            return MedusaProposer(model, batch, dtype)
        if (tokens := batch.history.on_host) is not None:
            return NgramProposer(tokens, batch.device)
        limits = batch.limits
        return CopyingNgramProposer(limits.max_batch_size, limits.max_tokens + 1, batch.device)
