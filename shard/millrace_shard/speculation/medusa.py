"""Draft tokens of Medusa heads: small networks on the last hidden state of the model, one for each position ahead.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Each head proposes
its likeliest token; the heads form one sequence of draft tokens and no tree.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import DraftTokens, StepLayout, StepRows
from millrace_shard.batch.step_tokens import ForcedTokens
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, LayerCache, Linear
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.decoder import Decoder
from millrace_shard.models.interface import MakeLayers
from millrace_shard.speculation.checkpoints import WEIGHTS, MedusaConfig
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.weights.weights import Weights

NEWER_PREFIX = "medusa_head."
"""The prefix of tensor names in newer checkpoints."""


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Residual blocks `x + silu(linear(x))` and an output head."""

    blocks: tuple[Linear, ...]
    out: Linear

    def __call__(self, states: Tensor, group: ProcessGroup, vocab_size: int) -> Tensor:
        """Logits [R, vocab] float32 of states [R, hidden], on every rank."""
        for block in self.blocks:
            states = states + F.silu(block(states))
        return group.all_gather_logits(self.out(states), vocab_size)


class MedusaModel:
    """A decoder with Medusa heads: a CausalModel that keeps the hidden states of its last forward pass."""

    def __init__(
        self,
        decoder: Decoder,
        folder: Path,
        config: MedusaConfig,
        *,
        dtype: torch.dtype,
        kernels: Kernels,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        """Read the heads in `folder`. Raises WeightsError."""
        self.info = decoder.info
        self.geometry = decoder.geometry
        self.hidden_size = decoder.hidden_size
        self.last_states: Tensor | None = None
        """[L, hidden] of the rows with logits, after the last norm; None after a pass in two parts."""
        self.decoder = decoder
        self._group = group
        weights = Weights(folder, dtype=dtype, device=device, group=group, file=WEIGHTS)
        prefix = "" if "0.0.linear.weight" in weights else NEWER_PREFIX
        hidden, vocab = self.hidden_size, self.info.vocab_size
        self.heads = tuple(
            MedusaHead(
                tuple(
                    kernels.linear(
                        weights.replicated(f"{prefix}{head}.{block}.linear.weight", hidden, hidden),
                        weights.replicated(f"{prefix}{head}.{block}.linear.bias", hidden),
                    )
                    for block in range(config.num_layers)
                ),
                kernels.head(
                    weights.vocabulary(f"{prefix}{head}.{config.num_layers}.weight", vocab, hidden)
                ),
            )
            for head in range(config.num_heads)
        )
        weights.close()

    def forward(self, batch: RaggedBatch, cache: Many[LayerCache]) -> Tensor:
        self.last_states = self.decoder.states(batch, cache)
        return self.decoder.logits(self.last_states, batch.logit_adapters)

    def states(self, batch: RaggedBatch, cache: Many[LayerCache]) -> Tensor:
        return self.decoder.states(batch, cache)

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.decoder.logits(states, adapters)

    def first_layers(self, count: int) -> MedusaModel:
        first = copy.copy(self)
        first.decoder = self.decoder.first_layers(count)
        first.geometry = first.decoder.geometry
        return first

    def with_layers(self, make: MakeLayers) -> MedusaModel:
        other = copy.copy(self)
        other.decoder = self.decoder.with_layers(make)
        return other

    def draft(self, states: Tensor, num_heads: int) -> Tensor:
        """The likeliest token of each of the first `num_heads` heads, [R, num_heads] int64, for states [R, hidden]."""
        heads = self.heads[:num_heads]
        logits = (head(states, self._group, self.info.vocab_size) for head in heads)
        return torch.stack([each.argmax(-1) for each in logits], dim=1)


class MedusaProposer(Proposer):
    """Keeps the state of the last computed token of each sequence, from which all heads draft."""

    likely_reason = "the heads were trained for another model"

    def __init__(self, model: MedusaModel, batch: Batch, dtype: torch.dtype) -> None:
        size = batch.limits.max_batch_size
        self._model = model
        self._batch = batch
        self._states = torch.zeros(size, model.hidden_size, dtype=dtype, device=batch.device)
        self._is_fresh = np.zeros(size, dtype=np.bool_)
        """Whether the state belongs to the second to last token."""

    def admit(self, sequence: Sequence) -> None:
        """The sequence has no state before its prompt is computed."""
        self._is_fresh[sequence.slot] = False

    def propose(self, rows: StepRows) -> DraftTokens:
        """Draft tokens for each row that may have some and has a fresh state."""
        fresh = self._is_fresh[rows.slots] & (rows.counts == 1)
        counts = np.where(fresh, np.minimum(rows.max_draft_tokens, len(self._model.heads)), 0)
        chosen = np.flatnonzero(counts > 0)
        if not len(chosen):
            return DraftTokens.none(len(rows.slots), self._batch.device)
        longest = int(counts.max())
        states = self._states[self._batch.to_device(rows.slots[chosen])]
        drafted = self._model.draft(states, longest)
        filled = np.flatnonzero((np.arange(longest) < counts[chosen, None]).ravel())
        return DraftTokens(counts=counts, ids=drafted.view(-1)[self._batch.to_device(filled)])

    def follow(
        self, layout: StepLayout, ids: Tensor, expected: Tensor | None, forced: ForcedTokens
    ) -> None:
        """Keep the state of the token before the last accepted one of each row, if the pass has left states."""
        slots = layout.yield_slots
        self._is_fresh[layout.slots] = False
        states, self._model.last_states = self._model.last_states, None
        if states is None or layout.is_plain:
            # CUDA graphs and steps that score prompts leave no states; rows of plain steps need none.
            return
        places = self._batch.to_device(_places(layout))
        if expected is None:
            last = places[:, 0]
        else:
            # The sample after the last draft token equals none, so that there is always a first difference.
            differs = (ids.to(torch.int32) != expected)[places]
            last = places.gather(1, differs.int().argmax(1, keepdim=True)).squeeze(1)
        self._states[self._batch.to_device(slots)] = states[last]
        self._is_fresh[slots] = True
        self._is_fresh[slots[list(forced)]] = False


def _places(layout: StepLayout) -> Ints:
    """[Y, K], places of the sampled positions of each row; the last one pads rows with fewer than K."""
    num_samples = layout.num_samples
    firsts = num_samples.cumsum() - num_samples
    columns = np.arange(num_samples.max())
    places: Ints = firsts[:, None] + np.minimum(columns, num_samples[:, None] - 1)
    return places
