"""Drafts of heads that read the model's hidden states: EAGLE, EAGLE-3 and MTP layers, as chains.

The head's layer computes position t from the hidden state of token t and the id of token t + 1, and predicts token
t + 2. So the states of a step suffice for the positions of the step: nothing of a state outlives its step but the
head's results at the sampled positions. Keys and values have the numbers of the model's blocks, so the prefix cache,
preemption and replay need nothing more. The last position of a cached block was computed with the token that
followed it in another sequence, which costs at most a draft.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import closing
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.batch import Batch
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step_layout import DraftTokens, StepLayout, StepRows, spread
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.errors import ModelError
from millrace_shard.kernels.base import (
    Kernels,
    Layer,
    LayerCache,
    Layers,
    Linear,
    Reduce,
    normalised,
)
from millrace_shard.kernels.lora.adapter_table import AdapterRows
from millrace_shard.kernels.ragged import RaggedBatch
from millrace_shard.models.decoder import Decoder, embedded
from millrace_shard.models.interface import KVLayer, MakeLayers
from millrace_shard.models.layer_loader import LayerLoader
from millrace_shard.models.rope import RopeTables
from millrace_shard.models.split import kv_heads_per_rank
from millrace_shard.speculation.head_spec import HeadKind, HeadSpec
from millrace_shard.speculation.proposer import Proposer
from millrace_shard.weights.weights import Weights


class TappedLayers:
    """Layers that keep copies of the residual stream on the way.

    The sums are those that the next layer would have begun with, so that results have the same bits.
    """

    def __init__(
        self,
        kernels: Kernels,
        layers: Many[Layer],
        reduce: Reduce | None,
        taps: Many[int],
        keep: Callable[[Tensor], None],
    ) -> None:
        """Copies are kept after each number of layers in `taps`; `keep` gets them all, [T, taps * hidden]."""
        self._taps, self._keep = taps, keep
        ends = sorted({*taps, len(layers)} - {0})
        self._runs: list[tuple[slice, Layers]] = []
        for start, end in zip([0, *ends], ends, strict=False):
            self._runs.append((slice(start, end), kernels.layers(layers[start:end], reduce)))

    def __call__(self, residual: Tensor, batch: RaggedBatch, caches: Many[LayerCache]) -> Tensor:
        """[T, hidden]; `residual` is changed in place."""
        copies = {0: residual.clone()} if 0 in self._taps else {}
        x: Tensor | None = None
        for part, run in self._runs:
            if x is not None:
                residual += x
                copies[part.start] = residual.clone()
            x = run(residual, batch, caches[part])
        assert x is not None, "a decoder has layers"
        last = self._runs[-1][0].stop
        if last in self._taps:
            copies[last] = residual + x
        self._keep(torch.cat([copies[tap] for tap in self._taps], dim=1))
        return x


class TappedModel:
    """A decoder as a CausalModel that keeps hidden states for a head."""

    def __init__(self, decoder: Decoder, kernels: Kernels, taps: tuple[int, ...]) -> None:
        """`taps` are numbers of layers after which states are kept; those past the last layer count as it."""
        self.info = decoder.info
        self.geometry = decoder.geometry
        self._whole, self._kernels, self._all_taps = decoder, kernels, taps
        self.taps = tuple(min(tap, len(decoder.geometry.layers)) for tap in taps)
        self._kept: list[Tensor] = []
        """The states of the last pass, if they were not taken; models over other layers have the same list."""
        self.decoder = decoder.with_layers(self.tapped_layers)

    def tapped_layers(self, layers: Many[Layer], reduce: Reduce | None) -> TappedLayers:
        """All layers, which keep states for `take`."""
        return TappedLayers(self._kernels, layers, reduce, self.taps, self.keep)

    def new_states(self, count: int) -> Tensor:
        """Zeros [count, taps * hidden] in the dtype of the model."""
        return self._whole.embedding.new_zeros(count, len(self.taps) * self.info.hidden_size)

    def keep(self, states: Tensor) -> None:
        """Keep the hidden states [T, taps * hidden] of a pass, in place of earlier ones."""
        self._kept[:] = [states]

    def take(self) -> Tensor | None:
        """The hidden states [T, taps * hidden] of the last pass, once."""
        return self._kept.pop() if self._kept else None

    def forward(self, batch: RaggedBatch, cache: Many[LayerCache]) -> Tensor:
        return self.decoder.forward(batch, cache)

    def states(self, batch: RaggedBatch, cache: Many[LayerCache]) -> Tensor:
        return self.decoder.states(batch, cache)

    def logits(self, states: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        return self.decoder.logits(states, adapters)

    def first_layers(self, count: int) -> TappedModel:
        return TappedModel(self._whole.first_layers(count), self._kernels, self._all_taps)

    def with_layers(self, make: MakeLayers) -> TappedModel:
        """The layers that `make` yields call `keep` themselves."""
        other = copy.copy(self)
        other.decoder = self._whole.with_layers(make)
        return other


class DraftHead:
    """The weights of a head on one rank, and its layer."""

    def __init__(
        self,
        spec: HeadSpec,
        decoder: Decoder,
        weights: Weights,
        kernels: Kernels,
        group: ProcessGroup,
        ropes: RopeTables,
    ) -> None:
        """Read the head of `decoder`, whose embedding and output head it uses where it has none. Raises ModelError."""
        self.spec = spec
        self._decoder, self._kernels, self._group = decoder, kernels, group
        hidden, vocab = decoder.hidden_size, decoder.info.vocab_size
        attention = spec.layer.attention
        heads = kv_heads_per_rank(attention, group.world_size)
        self.geometry = (KVLayer(heads, attention.head_dim, latent_dim=attention.latent_dim),)
        is_eagle3 = spec.kind is HeadKind.EAGLE3
        with closing(weights):
            loader = LayerLoader(spec.decoder, ropes, weights, kernels, group)
            self._join = self._linear(weights, hidden)
            inputs = 2 * hidden if is_eagle3 else None
            self._layer = loader.layer(spec.index, spec.prefix, inputs)
            self._norms = [loader.norm(name) for name in spec.norms]
            self._last_norm = loader.norm("norm") if is_eagle3 else None
            self._embedding = decoder.embedding
            if spec.has_embedding:
                self._embedding = weights.vocabulary("embed_tokens.weight", vocab, hidden)
            self._head: Linear | None = None
            if spec.draft_vocab_size is not None:
                own = weights.vocabulary("lm_head.weight", spec.draft_vocab_size, hidden)
                self._head = kernels.head(own)
            self._targets = self._mapping(weights, vocab) if spec.is_mapped else None

    def _linear(self, weights: Weights, hidden: int) -> Linear:
        spec, name = self.spec, self.spec.join
        inputs = hidden * (len(spec.taps) if spec.kind is HeadKind.EAGLE3 else 2)
        bias = weights.replicated(f"{name}.bias", hidden) if spec.has_bias else None
        return self._kernels.linear(weights.replicated(f"{name}.weight", hidden, inputs), bias)

    def _mapping(self, weights: Weights, vocab: int) -> Tensor:
        """The token that each output stands for. Raises ModelError for one that the model does not have."""
        offsets = weights.whole("d2t").long()
        targets = torch.arange(len(offsets)) + offsets
        if int(targets.min()) < 0 or int(targets.max()) >= vocab:
            raise ModelError(
                f"d2t of the EAGLE-3 head in {self.spec.folder} names tokens that the model does not have"
            )
        return targets.to(self._embedding.device)

    def states(self, taken: Tensor) -> Tensor:
        """The head's input [T, hidden] of the model's hidden states [T, taps * hidden]."""
        if self.spec.kind is HeadKind.EAGLE3:
            return self._join(taken)
        return normalised(self._kernels, taken, self._decoder.last_norm)

    def __call__(
        self,
        ids: Tensor,
        states: Tensor,
        batch: RaggedBatch,
        cache: LayerCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The results [R, hidden] at `rows` [R], or at all tokens, which are the states of the next positions.

        `ids` [T] are the tokens that follow each token of `batch`. Keys and values are stored, and `states` [T, hidden]
        may be overwritten.
        """
        tokens = embedded(ids, self._embedding, self._group)
        inputs, residual = self._inputs(tokens, states)
        assert self._layer.attention is not None
        attended = self._layer.attention(None, inputs, batch, cache)
        if rows is not None:
            attended, residual = attended[rows], residual[rows]
        if not len(attended):
            return attended
        x = self._layer.after(attended, residual, self._group.all_reduce)
        x = residual + x
        return self._normed(x, 2) if self.spec.kind is HeadKind.MTP else x

    def _inputs(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads, and the residual stream."""
        if self.spec.kind is HeadKind.EAGLE3:
            normed = self._normed(states, 1)
            inputs = torch.cat([self._normed(tokens, 0), normed], dim=1)
            return inputs, normed if self.spec.norm_before_residual else states
        if self.spec.kind is HeadKind.MTP:
            tokens, states = self._normed(tokens, 0), self._normed(states, 1)
        residual = self._join(torch.cat([tokens, states], dim=1))
        return residual, residual

    def _normed(self, x: Tensor, norm: int) -> Tensor:
        return normalised(self._kernels, x, self._norms[norm])

    def draft(self, results: Tensor) -> Tensor:
        """The likeliest token [R] int64 after each of `results` [R, hidden]."""
        normed = normalised(self._kernels, results, self._last_norm)
        if self._head is None:
            return self._decoder.logits(normed).argmax(-1)
        assert self.spec.draft_vocab_size is not None
        logits = self._group.all_gather_logits(self._head(normed), self.spec.draft_vocab_size)
        best = logits.argmax(-1)
        return best if self._targets is None else self._targets[best]


class ChainRows(NamedTuple):
    """D rows that draft; in a graph, the columns are tensors on the device."""

    slots: Ints
    places: Ints
    """Which of the slot's results predicts the first token."""
    ends: Ints
    """The position of the first token."""
    counts: Ints
    """Tokens of each row, at least 1."""


class Chains(Protocol):
    """Chains of drafts that were captured in graphs."""

    def drafts(self, rows: ChainRows) -> Tensor | None:
        """As `HeadProposer.chain`, at least `max(counts)` long, and valid until the next call; None: no graph."""


class HeadProposer(Proposer):
    """Runs the head over all tokens of each step, and drafts from its results at the sampled positions."""

    likely_reason = "the head was trained for another model, or for hidden states of other layers"

    def __init__(
        self,
        head: DraftHead,
        model: TappedModel,
        kernels: Kernels,
        cache: LayerCache,
        batch: Batch,
        dtype: torch.dtype,
    ) -> None:
        """`cache` has as many blocks as the model's cache, of the same size; `dtype` is the model's."""
        self._head, self._model, self._kernels, self._dtype = head, model, kernels, dtype
        self._cache, self._batch = cache, batch
        limits, hidden = batch.limits, model.info.hidden_size
        self._last_id = model.info.vocab_size - 1
        shape = limits.max_batch_size + 1, 1 + limits.max_draft_tokens, hidden
        self._results = torch.zeros(shape, dtype=dtype, device=batch.device)
        """Of the last step of each slot, one for each position that it sampled; the last slot is for padding."""
        self._firsts, self._counts = np.zeros((2, limits.max_batch_size), dtype=np.int64)
        """The first of those positions, and their number."""
        self.chains: Chains | None = None

    def admit(self, sequence: Sequence) -> None:
        """The sequence has no results before its prompt is computed."""
        self._counts[sequence.slot] = 0

    def clear_blocks(self, blocks: Tensor) -> None:
        self._kernels.zero_blocks(self._cache, blocks)

    def clear_rows(self, rows: Tensor) -> None:
        self._kernels.zero_rows(self._cache, rows, self._dtype)

    def advance(self, layout: StepLayout, batch: RaggedBatch | None) -> None:
        """Compute the positions of the step. Ids after a rejected draft token are the samples there, and do no harm."""
        taken = self._model.take()
        if taken is None:
            return
        if batch is None:
            computed = layout.slots, layout.starts, layout.counts
            batch, _ = self._batch.ragged_with(*computed, layout.logit_rows, ())
        rows, positions = spread(layout.starts, layout.counts)
        ids = self._batch.token_table.read(layout.slots[rows], positions + 1)
        # The table is undefined after the last token of a prompt that is only pooled.
        ids = ids.clamp(0, self._last_id)
        num_sampled, num_samples = len(layout.sampled), layout.num_samples
        sampled = self._batch.to_device(layout.logit_rows[:num_sampled])
        results = self._head(ids, self._head.states(taken), batch, self._cache, sampled)
        self._counts[layout.slots] = 0
        if not num_sampled:
            return
        starts = num_samples.cumsum() - num_samples
        offsets = np.arange(num_sampled) - np.repeat(starts, num_samples)
        index = self._batch.to_device(np.stack([layout.sampled, offsets]))
        self._results[index[0], index[1]] = results
        self._firsts[layout.yield_slots] = layout.sampling.positions[starts]
        self._counts[layout.yield_slots] = num_samples

    def propose(self, rows: StepRows) -> DraftTokens:
        """Draft for each row that may have some and whose last token is the last one that its slot sampled."""
        ends = rows.num_tokens
        places = ends - 1 - self._firsts[rows.slots]
        is_known = (rows.counts == 1) & (places >= 0) & (places < self._counts[rows.slots])
        counts = np.where(is_known, rows.max_draft_tokens, 0)
        drafting = np.flatnonzero(counts > 0)
        if not len(drafting):
            return DraftTokens.none(len(rows.slots), self._batch.device)
        slots, most = rows.slots[drafting], counts[drafting]
        chosen = ChainRows(slots, places[drafting], ends[drafting], most)
        drafted = None if self.chains is None else self.chains.drafts(chosen)
        if drafted is None:
            drafted = self.draft(chosen)
        width = drafted.shape[1]
        filled = np.flatnonzero((np.arange(width) < most[:, None]).ravel())
        ids = drafted.reshape(-1)[self._batch.to_device(filled)]
        return DraftTokens(counts=counts, ids=ids)

    def draft(self, rows: ChainRows) -> Tensor:
        """[D, max(counts)] int64, the tokens from each row's end on; they are 0 past its count."""
        slots, places, ends, counts = rows
        longest, to_device = int(counts.max()), self._batch.to_device
        drafted = torch.zeros(len(slots), longest, dtype=torch.int64, device=self._batch.device)
        index = to_device(np.stack([slots, places]))
        results = self._results[index[0], index[1]]
        active = np.arange(len(slots))
        ids = self._head.draft(results)
        drafted[:, 0] = ids
        for offset in range(1, longest):
            stays = np.flatnonzero(counts[active] > offset)
            active, kept = active[stays], to_device(stays)
            ones, every = np.ones(len(active), dtype=np.int64), np.arange(len(active))
            starts = ends[active] + offset - 2
            ragged, _ = self._batch.ragged_with(slots[active], starts, ones, every, ())
            results = self._head(ids[kept], results[kept], ragged, self._cache)
            ids = self._head.draft(results)
            drafted[to_device(active), offset] = ids
        return drafted

    def chain(self, rows: Tensor, length: int) -> Tensor:
        """`draft` of `rows` [4, D], the columns of ChainRows as int64 on the device, as a graph can record it.

        The result [D, length] int64 has tokens past a row's count, which are computed as padding: the row may have no
        block for them.
        """
        slots, places, ends, counts = rows
        results = self._results[slots, places]
        drafted = [self._head.draft(results)]
        for offset in range(1, length):
            is_over = counts <= offset
            own = slots.masked_fill(is_over, self._batch.padding_slot)
            positions = (ends + (offset - 2)).masked_fill(is_over, 0)
            ragged = self._batch.ragged_on_device(own, positions)
            results = self._head(drafted[-1], results, ragged, self._cache)
            drafted.append(self._head.draft(results))
        return torch.stack(drafted, dim=1)

    def rehearse(self, batch: RaggedBatch, taken: Tensor) -> None:
        """Compute `batch`, the whole sequence of slot 0, from the model's hidden states.

        The results of the slot become those at the sequence's first tokens, again from the first on if it is short.
        """
        states = self._head.states(taken)
        results = self._head(batch.ids.roll(-1), states, batch, self._cache)
        firsts = torch.arange(self._results.shape[1], device=results.device) % len(results)
        self._results[0] = results[firsts]
