"""From logits to tokens: processors, warpers and choice, in TGI's order, vectorised over the rows of a step.

The operations on a row depend only on its own parameters and scores, and each operation treats rows independently, so
the bits of a row's token, log probability and top tokens do not depend on the composition of the batch.

The number of top tokens that tie at the last place is on the device, and the host must not wait for it. The device
therefore returns a few tokens more than requested; the host reads the whole row in the rare case that all of these tie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_proto.sampling import NEUTRAL, NO_RULES, SequenceRules
from millrace_shard.arrays import Floats, Ints
from millrace_shard.device import transfers
from millrace_shard.device.transfers import download_on_side_stream, upload
from millrace_shard.kernels.scores import RowMasks, SamplingKernels, aligned, choose_greedy
from millrace_shard.sampling.penalties import Bias, BiasTable
from millrace_shard.sampling.processors import Processors
from millrace_shard.sampling.sampling_rows import RowGroups, RowIndexes, tiles
from millrace_shard.sampling.sampling_rows import SamplingRows as SamplingRows
from millrace_shard.sampling.thresholds import draw_from, find_threshold, uniforms
from millrace_shard.sampling.warpers import (
    NUM_CANDIDATES,
    Candidates,
    CandidateWarpers,
    apply_temperature,
    draw_candidate,
    exclude_top_choices,
    find_candidates,
    join_candidates,
    keep_top_k,
    keep_top_n_sigma,
    shares,
)
from millrace_shard.sampling.watermark import Watermark

TIE_ROOM = 16
"""Tokens beyond the requested ones that may tie with the last one before the whole row is read."""
LEAST = np.finfo(np.float32).min


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopTokens:
    """The W best tokens of each of n rows."""

    rows: Ints
    """[n]."""
    counts: Ints
    """[n], at least 1 and at most V."""
    best: Tensor
    """[2, n, W] int32: ids and bits of log probabilities, the most likely first."""
    logprobs: Tensor
    """[n, V] float32, or [n, W] where `best` holds all possible tokens."""

    @classmethod
    def of(cls, logprobs: Tensor, rows: Ints, counts: Ints) -> TopTokens:
        """The top tokens of `logprobs` [n, V] float32, without a wait for the device; `counts` is limited to V."""
        counts = np.minimum(counts, logprobs.shape[1])
        width = min(logprobs.shape[1], int(counts.max()) + TIE_ROOM)
        values, ids = logprobs.topk(width, dim=-1)
        best = torch.stack([ids.to(torch.int32), values.view(torch.int32)])
        return cls(rows=rows, counts=counts, best=best, logprobs=logprobs)

    @classmethod
    def among(cls, ids: Tensor, logprobs: Tensor, rows: Ints, counts: Ints) -> TopTokens:
        """The top tokens among `ids` [n, W] int64 with `logprobs` [n, W] float32, all possible tokens of each row."""
        ordered = logprobs.sort(dim=-1, descending=True)
        ids = ids.gather(1, ordered.indices).to(torch.int32)
        best = torch.stack([ids, ordered.values.view(torch.int32)])
        counts = np.minimum(counts, logprobs.shape[1])
        return cls(rows=rows, counts=counts, best=best, logprobs=ordered.values)

    def chosen(self, best: Tensor) -> tuple[Ints, Ints, Floats]:
        """Row, id and log probability of the best `counts` tokens of each row, and of all that tie with the last one.

        Impossible tokens are excluded. `best` is the host copy of the field of this name.
        """
        ids, bits = best.numpy()
        values = bits.view(np.float32)
        n, width = values.shape
        last = np.maximum(values[np.arange(n), self.counts - 1], LEAST)[:, None]
        is_chosen = values >= last
        may_tie_on = is_chosen[:, -1] & (width < self.logprobs.shape[1])
        overflows = np.flatnonzero(may_tie_on)
        is_chosen[overflows] = False
        owners, columns = np.nonzero(is_chosen)
        parts = [(self.rows[owners], ids[owners, columns], values[owners, columns])]
        for row in overflows:
            whole = download_on_side_stream(self.logprobs[row])
            tied = np.flatnonzero(whole >= last[row])
            parts.append((np.full(len(tied), self.rows[row]), tied, whole[tied]))
        rows, tokens, logprobs = (np.concatenate(column) for column in zip(*parts, strict=True))
        return rows, tokens.astype(np.int64), logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The sampled tokens of R rows, on the device. A failed row has an arbitrary id of the vocabulary."""

    ids: Tensor
    """[R] int64."""
    logprobs: Tensor
    """[R] float32, in the distribution that was sampled from."""
    failed: Tensor
    """[R] bool: the logits, or the processed scores, were not finite."""
    top: tuple[TopTokens, ...]
    """Top tokens of the rows that request them."""
    words: Tensor | None = None
    """[3, R] int32: ids, bits of log probabilities and failures side by side, if they are."""

    @classmethod
    def of_words(cls, words: Tensor) -> Sampled:
        ids, logprobs, failed = words
        return cls(
            ids=ids, logprobs=logprobs.view(torch.float32), failed=failed, top=(), words=words
        )


class Sampler:
    """Samples rows over the token table [slots, length] int32, whose device it works on."""

    def __init__(
        self,
        token_table: Tensor,
        eos_token_ids: tuple[int, ...],
        watermark: Watermark | None = None,
        kernels: SamplingKernels | None = None,
    ) -> None:
        """Without `kernels`, everything runs on plain torch."""
        self._device = token_table.device
        self._index = RowIndexes(token_table.device)
        self._find_threshold = None if kernels is None else kernels.find_threshold
        self.biases = BiasTable(token_table.device)

        self._last: tuple[NDArray[np.void], RowGroups] | None = None
        self._processors = Processors(
            token_table, eos_token_ids, self.biases, watermark or Watermark(), kernels
        )

    def admit(self, slot: int, bias: Bias, rules: SequenceRules = NO_RULES) -> None:
        """A sequence with `bias`, which may be empty, and `rules` takes over `slot`."""
        self.biases.put(slot, bias)
        self._processors.rules.put(slot, rules)
        if self._processors.counts is not None:
            self._processors.counts.forget(slot)

    def drop(self, slots: Ints) -> None:

        self.biases.drop(slots)
        self._processors.rules.drop(slots)

    def clear(self) -> None:
        self.biases.clear()
        self._processors.rules.clear()

    def sample(self, logits: Tensor, rows: SamplingRows, masks: RowMasks | None = None) -> Sampled:
        """Choose one token per row from `logits` [R, V] float32, contiguous, which are overwritten."""
        groups = self.groups_of(rows.parameters)
        self._processors.apply(logits, rows, groups, masks)
        if groups.all_greedy and transfers.is_synchronous(self._device):
            return _choose_best(logits)
        size = logits.shape[1]
        parts = [
            (tile, _choose_best(self._select_rows(logits, tile)))
            for tile in tiles(np.flatnonzero(groups.is_greedy), self._device, size)
        ]
        is_left = ~groups.is_greedy
        if transfers.is_synchronous(self._device):
            for chosen in (groups.narrow_by_top_k, groups.narrow_by_probability):
                if len(chosen):
                    parts.append(self._sample_narrow(logits, rows, chosen))
                    is_left[parts[-1][0]] = False
        parts += [
            (tile, self._sample_whole(self._select_rows(logits, tile), rows.select(tile)))
            for tile in tiles(np.flatnonzero(is_left), self._device, size)
        ]
        return _join(parts, self._index)

    def groups_of(self, parameters: NDArray[np.void]) -> RowGroups:
        """The groups of the rows; cached, since a step with the same rows has the same `parameters` object."""
        if self._last is None or self._last[0] is not parameters:
            self._last = (parameters, RowGroups.of(parameters, num_candidates=NUM_CANDIDATES))
        return self._last[1]

    def _sample_narrow(
        self, logits: Tensor, rows: SamplingRows, chosen: Ints
    ) -> tuple[Ints, Sampled]:
        """Sample the complete ones of the `chosen` rows; returns these rows and their tokens."""
        warpers = CandidateWarpers(rows.parameters[chosen], self._device)
        has_top_k = bool(rows.parameters["top_k"][chosen[0]] > 0)
        parts = []
        done = 0
        for tile in tiles(chosen, self._device, logits.shape[1]):
            temperature = None if has_top_k else warpers.temperature[done : done + len(tile)]
            parts.append(find_candidates(self._select_rows(logits, tile), temperature))
            done += len(tile)
        candidates = join_candidates(parts)
        scores, is_complete = warpers.apply(candidates)
        complete = np.flatnonzero(is_complete.numpy())
        complete_rows = chosen[complete]
        if len(complete) < len(chosen):
            index = self._index(complete)
            scores, candidates = scores[index], candidates.select(index)
        return complete_rows, self._draw_narrow(candidates, scores, rows.select(complete_rows))

    def _draw_narrow(self, candidates: Candidates, scores: Tensor, rows: SamplingRows) -> Sampled:
        logprobs = scores.log_softmax(-1)
        column = draw_candidate(candidates, scores, self._uniforms(rows))[:, None]
        chosen_logprobs = logprobs.gather(1, column).squeeze(1)
        counts = rows.parameters["top_n_tokens"]
        top: tuple[TopTokens, ...] = ()
        if len(top_rows := np.flatnonzero(counts > 0)):
            index = self._index(top_rows)
            top = (
                TopTokens.among(candidates.ids[index], logprobs[index], top_rows, counts[top_rows]),
            )
        return Sampled(
            ids=candidates.ids.gather(1, column).squeeze(1),
            logprobs=chosen_logprobs,
            failed=~chosen_logprobs.isfinite(),
            top=top,
        )

    def _sample_whole(self, scores: Tensor, rows: SamplingRows) -> Sampled:
        """Sample from the scores [n, V] of rows that may keep any number of tokens."""
        p, size = rows.parameters, scores.shape[1]
        scores = aligned(scores)
        if len(chosen := np.flatnonzero(p["top_n_sigma"] > 0)):
            keep = partial(
                _keep, keep_top_n_sigma, rows.column("top_n_sigma", self._device, chosen)
            )
            scores = self._change_rows(scores.clone(), chosen, keep)
        scores = apply_temperature(scores, rows.column("temperature", self._device))
        scores = self._warp(scores, rows)
        logprobs = scores.log_softmax(-1)
        drawn = np.flatnonzero(p["do_sample"])
        if len(drawn) == len(p):
            ids = draw_from(scores, size, self._uniforms(rows))
        else:
            ids = scores.max(-1).indices
            if len(drawn):
                index = self._index(drawn)
                picked = draw_from(scores[index], size, self._uniforms(rows.select(drawn)))
                ids = ids.index_copy(0, index, picked)
        chosen_logprobs = logprobs.gather(1, ids[:, None]).squeeze(1)
        top: tuple[TopTokens, ...] = ()
        if len(top_rows := np.flatnonzero(p["top_n_tokens"] > 0)):
            top_logprobs = logprobs[self._index(top_rows)]
            top = (TopTokens.of(top_logprobs, top_rows, p["top_n_tokens"][top_rows]),)
        failed = ~chosen_logprobs.isfinite()
        return Sampled(ids=ids, logprobs=chosen_logprobs, failed=failed, top=top)

    def _warp(self, scores: Tensor, rows: SamplingRows) -> Tensor:
        """Scores [n, V], with dropped tokens at minus infinity."""
        p = rows.parameters
        if len(chosen := np.flatnonzero(p["top_k"] > 0)):
            ks = rows.column("top_k", self._device, chosen)
            largest = int(p["top_k"].max())
            scores = self._change_rows(
                scores, chosen, lambda some: keep_top_k(some, ks, largest, self._find_threshold)
            )
        for name, keep_part in shares(self._find_threshold or find_threshold):
            if len(chosen := np.flatnonzero(p[name] != NEUTRAL[name])):
                keep = partial(_keep, keep_part, rows.column(name, self._device, chosen))
                scores = self._change_rows(scores, chosen, keep)
        if len(chosen := np.flatnonzero(p["xtc_probability"] > 0)):
            exclude = partial(
                exclude_top_choices,
                probability=rows.column("xtc_probability", self._device, chosen),
                threshold=rows.column("xtc_threshold", self._device, chosen),
                uniforms=self._uniforms(rows, chosen),
            )
            scores = self._change_rows(scores, chosen, exclude)
        return scores

    def _change_rows(
        self, scores: Tensor, rows: Ints, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`scores` with `change` applied to `rows`, which are few or all."""
        if len(rows) == len(scores):
            return change(scores)
        index = self._index(rows)
        return scores.index_copy_(0, index, change(scores[index]))

    def _select_rows(self, logits: Tensor, rows: Ints) -> Tensor:
        """The `rows`, which ascend, for reading only: a view where they are consecutive."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return logits[first : last + 1]
        return logits[self._index(rows)]

    def _uniforms(self, rows: SamplingRows, chosen: Ints | None = None) -> Tensor:
        if rows.device is not None:
            return (rows.device if chosen is None else rows.device.select(chosen)).uniforms
        drawn = uniforms(rows.parameters["seed"], rows.positions)
        return upload(drawn if chosen is None else drawn[chosen], self._device)


def _keep(keep: Callable[[Tensor, Tensor], Tensor], column: Tensor, scores: Tensor) -> Tensor:
    return keep(scores, column)


def _join(parts: list[tuple[Ints, Sampled]], index: RowIndexes) -> Sampled:
    sampled = [part for _, part in parts]
    # Row numbers of top tokens within a part become row numbers of the step.
    tops = tuple(replace(top, rows=rows[top.rows]) for rows, part in parts for top in part.top)
    if len(parts) == 1:
        return replace(sampled[0], top=tops)
    order = index(np.argsort(np.concatenate([rows for rows, _ in parts])))
    return Sampled(
        ids=torch.cat([part.ids for part in sampled])[order],
        logprobs=torch.cat([part.logprobs for part in sampled])[order],
        failed=torch.cat([part.failed for part in sampled])[order],
        top=tops,
    )


def _choose_best(logits: Tensor) -> Sampled:
    best = choose_greedy(logits)
    return Sampled(ids=best.ids, logprobs=best.logprobs, failed=best.failed, top=())
