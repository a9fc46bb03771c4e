"""Speculative decoding of a loaded model: its draft model and its proposer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from millrace_shard.batch.batch import Batch
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.models.interface import CausalModel, KVLayer
from millrace_shard.speculation.draft_model import DraftProposer
from millrace_shard.speculation.medusa import MedusaModel, MedusaProposer
from millrace_shard.speculation.ngrams import CopyingNgramProposer, NgramProposer
from millrace_shard.speculation.proposer import Proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Draft tokens from a draft model or Medusa heads if there are any, else from n-grams."""

    max_draft_tokens: int
    """For one sequence in one step, at least 1."""
    draft: CausalModel | None = None

    @property
    def layers(self) -> tuple[KVLayer, ...]:
        """The layers of the draft model, which needs a KV cache."""
        return () if self.draft is None else self.draft.geometry.layers

    def proposer(
        self,
        model: CausalModel,
        kernels: Kernels,
        cache: list[LayerCache],
        batch: Batch,
        dtype: torch.dtype,
    ) -> Proposer:
        """A proposer for the sequences of `batch`, which `model` runs; `cache` is the KV cache of `layers`."""
        if self.draft is not None:
            return DraftProposer(self.draft, kernels, cache, batch)
        if isinstance(model, MedusaModel):
            return MedusaProposer(model, batch, dtype)
        if (tokens := batch.token_table.on_host) is not None:
            return NgramProposer(tokens, batch.device)
        limits = batch.limits
        return CopyingNgramProposer(limits.max_batch_size, limits.max_tokens + 1, batch.device)
