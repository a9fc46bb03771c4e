"""Guessing by Medusa heads: small networks on the model's last hidden state, one for each position ahead.

Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads". Each head proposes
its likeliest token, and together they are one chain; trees are not built.
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
from millrace_shard.batch.draft_tokens import DraftTokens
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import StepLayout, StepRows
from millrace_shard.batch.step_tokens import Chains
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.base import Kernels, LayerCache, Linear
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.model_loader.weights import Weights
from millrace_shard.models.decoder import Decoder
from millrace_shard.speculation.medusa_config import WEIGHTS, MedusaConfig
from millrace_shard.speculation.proposer import Proposer

NEWER_PREFIX = "medusa_head."
"""What stands before a head's number in the tensors' names of newer checkpoints."""


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Residual blocks `x + silu(linear(x))`, then an output head of its own."""

    blocks: tuple[Linear, ...]
    out: Linear

    def __call__(self, states: Tensor, group: ProcessGroup, vocab_size: int) -> Tensor:
        """Logits [R, vocab] float32 of states [R, hidden], on every rank."""
        for block in self.blocks:
            states = states + F.silu(block(states))
        return group.all_gather(self.out(states))[:, :vocab_size]


class MedusaModel:
    """A decoder with heads beside its own; a CausalModel that keeps the hidden states of its last forward pass."""

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
        """[L, hidden] of the logits' rows, after the last norm; None where the pass was made in two parts."""
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
        """The decoder's logits."""
        self.last_states = self.decoder.states(batch, cache)
        return self.decoder.logits(self.last_states)

    def states(self, batch: RaggedBatch, cache: Many[LayerCache]) -> Tensor:
        """The decoder's."""
        return self.decoder.states(batch, cache)

    def logits(self, states: Tensor) -> Tensor:
        """The decoder's."""
        return self.decoder.logits(states)

    def first_layers(self, count: int) -> MedusaModel:
        """As CausalModel says, with all heads."""
        first = copy.copy(self)
        first.decoder = self.decoder.first_layers(count)
        first.geometry = first.decoder.geometry
        return first

    def guess(self, states: Tensor, most: int) -> Tensor:
        """The likeliest token of each of the first `most` heads, [R, most] int64, of states [R, hidden]."""
        logits = (head(states, self._group, self.info.vocab_size) for head in self.heads[:most])
        return torch.stack([each.argmax(-1) for each in logits], dim=1)


class MedusaProposer(Proposer):
    """Keeps the state of the last token that was computed of each sequence, from which all heads guess."""

    def __init__(self, model: MedusaModel, batch: Batch, dtype: torch.dtype) -> None:
        size = batch.limits.max_batch_size
        self._model = model
        self._batch = batch
        self._states = torch.zeros(size, model.hidden_size, dtype=dtype, device=batch.device)
        self._is_fresh = np.zeros(size, dtype=np.bool_)
        """Whether the state is that of the token before the last."""

    def admit(self, sequence: Sequence) -> None:
        """Its state is not known before its prompt is computed."""
        self._is_fresh[sequence.slot] = False

    def propose(self, rows: StepRows) -> DraftTokens:
        """A chain for each row that may have one and whose state is known."""
        fresh = self._is_fresh[rows.slots] & (rows.counts == 1)
        counts = np.where(fresh, np.minimum(rows.most_guesses, len(self._model.heads)), 0)
        chosen = np.flatnonzero(counts > 0)
        if not len(chosen):
            return DraftTokens.none(len(rows.slots), self._batch.device)
        longest = int(counts.max())
        states = self._states[self._batch.to_device(rows.slots[chosen])]
        guessed = self._model.guess(states, longest)
        filled = np.flatnonzero((np.arange(longest) < counts[chosen, None]).ravel())
        return DraftTokens(counts=counts, ids=guessed.view(-1)[self._batch.to_device(filled)])

    def follow(
        self, prepared: StepLayout, ids: Tensor, expected: Tensor | None, forced: Chains
    ) -> None:
        """Keep the state before the last token that counts of each row, if the pass has left states."""
        slots = prepared.yield_slots
        self._is_fresh[prepared.slots] = False
        states, self._model.last_states = self._model.last_states, None
        if states is None or prepared.is_plain:
            # A step by a graph leaves none, nor does one that scores prompts; rows that nobody guesses for need none.
            return
        places = self._batch.to_device(_places(prepared))
        if expected is None:
            last = places[:, 0]
        else:
            # The sample after the last guess equals none, so there always is a first that differs.
            differs = (ids.to(torch.int32) != expected)[places]
            last = places.gather(1, differs.int().argmax(1, keepdim=True)).squeeze(1)
        self._states[self._batch.to_device(slots)] = states[last]
        self._is_fresh[slots] = True
        self._is_fresh[slots[list(forced)]] = False


def _places(prepared: StepLayout) -> Ints:
    """[Y, K], which sampled positions each row has; its last one fills up what it has not."""
    num_samples = prepared.num_samples
    firsts = num_samples.cumsum() - num_samples
    columns = np.arange(num_samples.max())
    places: Ints = firsts[:, None] + np.minimum(columns, num_samples[:, None] - 1)
    return places
