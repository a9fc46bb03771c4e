"""Draft tokens of a smaller model with the same vocabulary.

Leviathan et al. 2023 and Chen et al. 2023, "Accelerating Large Language Model Decoding with Speculative Sampling". The
draft is greedy, since verification compares samples and not distributions.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import DraftTokens, StepLayout, StepRows
from millrace_shard.batch.step_tokens import ForcedTokens
from millrace_shard.kernels.base import Kernels, LayerCache
from millrace_shard.models.interface import CausalModel
from millrace_shard.speculation.proposer import Proposer

MAX_CATCH_UP = 256
"""Tokens per step that the draft model computes for a sequence that has decoded without drafts, before it drafts."""


class DraftProposer(Proposer):
    """Keeps its KV in blocks with the numbers of the model's blocks, so that sequences share both.

    A block that the model filled without drafts may have no KV here; drafts that read it are bad and do no harm.
    """

    likely_reason = "the draft model was trained on other texts than the model"

    def __init__(
        self,
        model: CausalModel,
        kernels: Kernels,
        cache: Many[LayerCache],
        batch: Batch,
        dtype: torch.dtype,
    ) -> None:
        """`cache` has as many blocks as the model's cache, of the same size; `dtype` is the model's."""
        self._model = model
        self._dtype = dtype
        self._kernels = kernels
        self._cache = cache
        self._batch = batch
        self._longest = model.info.max_position_embeddings
        self._vocab_size = min(model.info.vocab_size, batch.limits.vocab_size)
        self._computed = np.zeros(batch.limits.max_batch_size, dtype=np.int64)
        """KV positions of each slot that the draft model has computed, accepted draft tokens included."""

    def admit(self, sequence: Sequence) -> None:
        """Cached positions have KV here too."""
        self._computed[sequence.slot] = sequence.cached_tokens

    def clear_blocks(self, blocks: Tensor) -> None:
        """Clear the blocks of the draft model's cache."""
        for layer in self._cache:
            self._kernels.zero_blocks(layer, blocks)

    def clear_rows(self, rows: Tensor) -> None:
        """Clear the rows of the draft model's cache."""
        for layer in self._cache:
            self._kernels.zero_rows(layer, rows, self._dtype)

    def verify(self, slots: Ints, computed: Ints) -> None:
        """The KV of rejected draft tokens does not count."""
        self._computed[slots] = np.minimum(self._computed[slots], computed)

    def follow(
        self,
        layout: StepLayout,
        ids: Tensor,  # noqa: ARG002
        expected: Tensor | None,  # noqa: ARG002
        forced: ForcedTokens,
    ) -> None:
        """Draft tokens of rows with forced tokens do not count."""
        rows = layout.yields[list(forced)]
        slots = layout.slots[rows]
        ends = (layout.starts + layout.counts - layout.num_drafts)[rows]
        self._computed[slots] = np.minimum(self._computed[slots], ends)

    def propose(self, rows: StepRows) -> DraftTokens:
        """Compute the prompts of the step and the missing tokens of rows that draft; then draft."""
        starts, ends = self._computed[rows.slots], rows.num_tokens
        is_prompt = np.arange(len(rows.slots)) < rows.num_chunks
        fits = ends <= self._longest
        num_drafts = np.minimum(rows.max_draft_tokens, self._longest - ends)
        takes_part = fits & (is_prompt | (num_drafts > 0))
        counts = np.where(takes_part, ends - starts, 0)
        counts = np.where(is_prompt, counts, np.minimum(counts, MAX_CATCH_UP))
        num_drafts = np.where(takes_part & (starts + counts == ends), num_drafts, 0)
        num_drafts[is_prompt] = 0
        computing = np.flatnonzero(counts > 0)
        if not len(computing):
            return DraftTokens.none(len(rows.slots), self._batch.device)
        drafting = np.flatnonzero(num_drafts > 0)
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
        ids = self._draft(rows.slots[drafting], ends[drafting], num_drafts[drafting], logits)
        return DraftTokens(counts=num_drafts, ids=ids)

    def _draft(self, slots: Ints, ends: Ints, num_drafts: Ints, logits: Tensor) -> Tensor:
        """`num_drafts[d]` tokens from position `ends[d]` on for each of D rows; the tokens of a row are adjacent.

        `logits` [D, V] predict the first token of each row.
        """
        longest = int(num_drafts.max())
        drafted = torch.zeros(len(slots), longest, dtype=torch.int64, device=self._batch.device)
        active = np.arange(len(slots))
        for offset in range(longest):
            if offset:
                active = np.flatnonzero(num_drafts > offset)
                ones = np.ones(len(active), dtype=np.int64)
                positions = ends[active] + offset - 1
                logits = self._forward(slots[active], positions, ones, np.arange(len(active)))
                self._computed[slots[active]] += 1
            ids = logits[:, : self._vocab_size].argmax(-1)
            drafted[self._batch.to_device(active), offset] = ids
            # The next pass reads them there.
            self._batch.token_table.write(slots[active], ends[active] + offset, ids)
        filled = np.flatnonzero((np.arange(longest) < num_drafts[:, None]).ravel())
        return drafted.view(-1)[self._batch.to_device(filled)]

    def _forward(self, slots: Ints, starts: Ints, counts: Ints, logit_rows: Ints) -> Tensor:
        ragged, _ = self._batch.ragged_with(slots, starts, counts, logit_rows, ())
        if self._model.info.vocab_size < self._batch.limits.vocab_size:
            # Only the padding of the larger embedding table has larger ids.
            last = self._model.info.vocab_size - 1
            ragged = replace(ragged, ids=ragged.ids.clamp(max=last))
        return self._model.forward(ragged, self._cache)
