"""Guessing by a smaller model of the same vocabulary, greedily.

Leviathan et al. 2023 and Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling"; the
draft is greedy, as samples are compared and not their distributions.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.draft_tokens import DraftTokens
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import StepLayout, StepRows
from millrace_shard.batch.step_tokens import Chains
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.proposer import Proposer

MOST_BEHIND = 256
"""Tokens that one step computes for a sequence that decoded without guesses; only then does it get some again."""


class DraftProposer(Proposer):
    """Its KV lies in blocks of the same numbers as the model's, so that whoever shares those shares these.

    A block that was filled while nothing was guessed may be empty here; what reads it guesses badly, and no more.
    """

    def __init__(
        self, model: CausalModel, kernels: Kernels, cache: Many[LayerCache], batch: Batch
    ) -> None:
        """`cache` has as many blocks as the model's own, of the same size."""
        self._model = model
        self._kernels = kernels
        self._cache = cache
        self._batch = batch
        self._longest = model.info.max_position_embeddings
        self._vocab_size = min(model.info.vocab_size, batch.limits.vocab_size)
        self._computed = np.zeros(batch.limits.max_batch_size, dtype=np.int64)
        """KV positions of each slot that are computed here, those of right guesses included."""

    def admit(self, sequence: Sequence) -> None:
        """Blocks that were found in the cache are computed here too."""
        self._computed[sequence.slot] = sequence.cached_tokens

    def clear_blocks(self, blocks: Tensor) -> None:
        """As the model's."""
        for layer in self._cache:
            self._kernels.zero_blocks(layer, blocks)

    def settle(self, slots: Ints, computed: Ints) -> None:
        """The KV of guesses that were wrong is none."""
        self._computed[slots] = np.minimum(self._computed[slots], computed)

    def follow(
        self,
        prepared: StepLayout,
        ids: Tensor,  # noqa: ARG002
        expected: Tensor | None,  # noqa: ARG002
        forced: Chains,
    ) -> None:
        """Guesses are of no use where a grammar forces tokens."""
        rows = prepared.yields[list(forced)]
        slots = prepared.slots[rows]
        sure = (prepared.starts + prepared.counts - prepared.guesses)[rows]
        self._computed[slots] = np.minimum(self._computed[slots], sure)

    def propose(self, rows: StepRows) -> DraftTokens:
        """Compute the prompts of the step, and the tokens that its drafting rows have come by; then guess."""
        starts, ends = self._computed[rows.slots], rows.num_tokens
        is_prompt = np.arange(len(rows.slots)) < rows.num_chunks
        fits = ends <= self._longest
        most = np.minimum(rows.most_guesses, self._longest - ends)
        wanted = fits & (is_prompt | (most > 0))
        counts = np.where(wanted, ends - starts, 0)
        counts = np.where(is_prompt, counts, np.minimum(counts, MOST_BEHIND))
        most = np.where(wanted & (starts + counts == ends), most, 0)
        most[is_prompt] = 0
        computing = np.flatnonzero(counts > 0)
        if not len(computing):
            return DraftTokens.none(len(rows.slots), self._batch.device)
        drafting = np.flatnonzero(most > 0)
        lasts = counts[computing].cumsum() - 1
        logits = self._forward(
            rows.slots[computing],
            starts[computing],
            counts[computing],
            lasts[np.isin(computing, drafting)],
        )
        self._computed[rows.slots[computing]] += counts[computing]
        if not len(drafting):
            return DraftTokens.none(len(rows.slots), self._batch.device)
        ids = self._draft(rows.slots[drafting], ends[drafting], most[drafting], logits)
        return DraftTokens(counts=most, ids=ids)

    def _draft(self, slots: Ints, ends: Ints, most: Ints, logits: Tensor) -> Tensor:
        """`most[d]` tokens from position `ends[d]` on for each of D rows, those of a row side by side.

        `logits` [D, V] predict the first.
        """
        longest = int(most.max())
        guessed = torch.zeros(len(slots), longest, dtype=torch.int64, device=self._batch.device)
        active = np.arange(len(slots))
        for place in range(longest):
            if place:
                active = np.flatnonzero(most > place)
                ones = np.ones(len(active), dtype=np.int64)
                positions = ends[active] + place - 1
                logits = self._forward(slots[active], positions, ones, np.arange(len(active)))
                self._computed[slots[active]] += 1
            ids = logits[:, : self._vocab_size].argmax(-1)
            guessed[self._batch.to_device(active), place] = ids
            # Where the next pass reads them.
            self._batch.history.write(slots[active], ends[active] + place, ids)
        filled = np.flatnonzero((np.arange(longest) < most[:, None]).ravel())
        return guessed.view(-1)[self._batch.to_device(filled)]

    def _forward(self, slots: Ints, starts: Ints, counts: Ints, logit_rows: Ints) -> Tensor:
        ragged = self._batch.ragged(slots, starts, counts, logit_rows)
        if self._model.info.vocab_size < self._batch.limits.vocab_size:
            # Ids that only padding of the larger table has.
            last = self._model.info.vocab_size - 1
            ragged = replace(ragged, ids=ragged.ids.clamp(max=last))
        return self._model.forward(ragged, self._cache)
