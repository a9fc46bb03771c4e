"""From logits to tokens: penalties, warpers and choice, in TGI's order, vectorised over the rows of a step.

Which operations a row goes through depends on its own parameters alone, and each of them treats rows independently,
so a row's token, log probability and candidates are the same bits in any company.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.fixed_point import draw, fixed_point
from millrace_shard.greedy import choose_greedy
from millrace_shard.host_copies import upload
from millrace_shard.penalties import History, Penalties, forbid, penalise
from millrace_shard.randomness import uniforms
from millrace_shard.step import Ints
from millrace_shard.top_tokens import TopTokens
from millrace_shard.warpers import apply_temperature, keep_top_k, keep_top_p, keep_typical

Mask = NDArray[np.bool_]

TILE_ELEMENTS = 1 << 19
"""Scores worked on at a time on CPU, so that what each pass leaves is still in the cache for the next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingRows:
    """What is known on the host of the R rows to be sampled, before the forward pass ends."""

    parameters: NDArray[np.void]
    """[R] of sequence.PARAMETERS."""
    positions: Ints
    """[R], index of the token to be sampled in its sequence: the number of tokens before it."""
    history_rows: Ints
    """[R], row of the history table."""

    def select(self, rows: Ints) -> SamplingRows:
        """Some of the rows."""
        return SamplingRows(
            parameters=self.parameters[rows],
            positions=self.positions[rows],
            history_rows=self.history_rows[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """On the device. Rows that failed hold some token within the vocabulary."""

    ids: Tensor
    """[R] int64."""
    logprobs: Tensor
    """[R] float32, of the distribution sampled from."""
    failed: Tensor
    """[R] bool: logits, or what the parameters made of them, were not finite."""
    top: tuple[TopTokens, ...]
    """Candidates of the rows that asked for some."""


class Sampler:
    """Knows the device, the table of token histories [slots, length] int32, and the end-of-sequence ids."""

    def __init__(self, history: Tensor, eos_token_ids: tuple[int, ...]) -> None:
        self._history = history
        self._device = history.device
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=history.device)

    def sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        """Choose one token a row from `logits` [R, V] float32, which this overwrites."""
        plain = _is_plain(rows)
        if plain.all():
            return _choose_best(logits)
        if plain.any():
            return self._sample_parts(logits, rows, np.flatnonzero(plain), np.flatnonzero(~plain))
        return self._sample_tiles(logits, rows)

    def _sample_parts(
        self, logits: Tensor, rows: SamplingRows, plain: Ints, other: Ints
    ) -> Sampled:
        """Rows that need nothing but their greatest logit apart from the rest."""
        plain_index, other_index = self._index(plain), self._index(other)
        best = _choose_best(logits[plain_index])
        sampled = self._sample_tiles(logits[other_index], rows.select(other))
        order = self._index(np.argsort(np.concatenate([plain, other])))
        return Sampled(
            ids=torch.cat([best.ids, sampled.ids])[order],
            logprobs=torch.cat([best.logprobs, sampled.logprobs])[order],
            failed=torch.cat([best.failed, sampled.failed])[order],
            top=tuple(replace(top, rows=other[top.rows]) for top in sampled.top),
        )

    def _sample_tiles(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        num_rows, size = logits.shape
        height = max(1, TILE_ELEMENTS // size)
        if self._device.type != "cpu" or num_rows <= height:
            return self._sample(logits, rows)
        starts = range(0, num_rows, height)
        tiles = [np.arange(start, min(start + height, num_rows)) for start in starts]
        return _join(
            [self._sample(logits[t[0] : t[-1] + 1], rows.select(t)) for t in tiles], starts
        )

    def _sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        best = logits.max(-1)
        ids = best.indices
        scores = self._process(logits, rows)
        scores = self._warp(scores, rows)
        logprobs = scores.log_softmax(-1)
        p = rows.parameters
        changed = np.flatnonzero(~p["do_sample"] & _is_processed(rows))
        if len(changed):
            index = self._index(changed)
            ids = ids.index_copy(0, index, scores[index].max(-1).indices)
        drawn = np.flatnonzero(p["do_sample"])
        if len(drawn):
            index = self._index(drawn)
            bits = uniforms(p["seed"][drawn], rows.positions[drawn])
            chosen = scores if len(drawn) == len(p) else scores[index]
            weights = fixed_point(chosen.softmax(-1))
            ids = ids.index_copy(0, index, draw(weights, self._index(bits)))
        chosen_logprobs = logprobs.gather(1, ids[:, None]).squeeze(1)
        return Sampled(
            ids=ids,
            logprobs=chosen_logprobs,
            failed=~(best.values.isfinite() & chosen_logprobs.isfinite()),
            top=self._top_tokens(logprobs, p["top_n_tokens"]),
        )

    def _process(self, scores: Tensor, rows: SamplingRows) -> Tensor:
        chosen = np.flatnonzero(_is_penalised(rows.parameters))
        if len(chosen):
            mine = rows.select(chosen)
            p = mine.parameters
            penalties = Penalties(
                repetition=self._column(p["repetition_penalty"]),
                frequency=self._column(p["frequency_penalty"]),
                presence=self._column(p["presence_penalty"]),
                occurrence=self._column(p["occurrence_penalty"]),
            )
            history = self._history_of(mine)
            scores = self._on(scores, chosen, lambda some: penalise(some, history, penalties))
        short = np.flatnonzero(_is_too_short(rows))
        if len(short) and len(self._eos):
            forbid(scores, self._index(short), self._eos)
        return scores

    def _warp(self, scores: Tensor, rows: SamplingRows) -> Tensor:
        p = rows.parameters
        if len(chosen := np.flatnonzero(p["temperature"] != 1)):
            temperature = self._column(p["temperature"][chosen])
            scores = self._on(scores, chosen, lambda some: apply_temperature(some, temperature))
        if len(chosen := np.flatnonzero(p["top_k"] > 0)):
            k = p["top_k"][chosen]
            ks, largest = self._column(k), int(k.max())
            scores = self._on(scores, chosen, lambda some: keep_top_k(some, ks, largest))
        if len(chosen := np.flatnonzero(p["top_p"] < 1)):
            top_p = self._column(p["top_p"][chosen])
            scores = self._on(scores, chosen, lambda some: keep_top_p(some, top_p))
        if len(chosen := np.flatnonzero(p["typical_p"] < 1)):
            typical_p = self._column(p["typical_p"][chosen])
            scores = self._on(scores, chosen, lambda some: keep_typical(some, typical_p))
        return scores

    def _history_of(self, rows: SamplingRows) -> History:
        longest = int(rows.positions.max())
        ids = self._history[:, :longest].index_select(0, self._index(rows.history_rows))
        return History(
            ids=ids.long(),
            lengths=self._column(rows.positions),
            num_prompt=self._column(rows.parameters["num_prompt"]),
        )

    def _top_tokens(self, logprobs: Tensor, wanted: Ints) -> tuple[TopTokens, ...]:
        chosen = np.flatnonzero(wanted > 0)
        if not len(chosen):
            return ()
        return (TopTokens.of(logprobs[self._index(chosen)], chosen, wanted[chosen]),)

    def _on(self, scores: Tensor, rows: Ints, change: Callable[[Tensor], Tensor]) -> Tensor:
        """`scores` with `change` applied to some rows; the rows are few or all."""
        if len(rows) == len(scores):
            return change(scores)
        index = self._index(rows)
        return scores.index_copy_(0, index, change(scores[index]))

    def _index(self, values: Ints) -> Tensor:
        return upload(values, self._device)

    def _column(self, values: NDArray[Any]) -> Tensor:
        return upload(values, self._device)[:, None]


def _join(parts: list[Sampled], starts: Iterable[int]) -> Sampled:
    """One above the other; `starts` are the first rows of the parts."""
    tops = (
        replace(top, rows=top.rows + start)
        for part, start in zip(parts, starts, strict=True)
        for top in part.top
    )
    return Sampled(
        ids=torch.cat([part.ids for part in parts]),
        logprobs=torch.cat([part.logprobs for part in parts]),
        failed=torch.cat([part.failed for part in parts]),
        top=tuple(tops),
    )


def _choose_best(logits: Tensor) -> Sampled:
    ids, logprobs = choose_greedy(logits)
    return Sampled(ids=ids, logprobs=logprobs, failed=~logprobs.isfinite(), top=())


def _is_plain(rows: SamplingRows) -> Mask:
    """Whether the greatest logit is the answer, and its log probability all that is asked for."""
    p = rows.parameters
    plain: Mask = (
        ~p["do_sample"]
        & ~_is_processed(rows)
        & (p["temperature"] == 1)
        & (p["top_k"] == 0)
        & (p["top_p"] >= 1)
        & (p["typical_p"] >= 1)
        & (p["top_n_tokens"] == 0)
    )
    return plain


def _is_penalised(p: NDArray[np.void]) -> Mask:
    penalised: Mask = (
        (p["repetition_penalty"] != 1)
        | (p["frequency_penalty"] != 0)
        | (p["presence_penalty"] != 0)
        | (p["occurrence_penalty"] != 0)
    )
    return penalised


def _is_too_short(rows: SamplingRows) -> Mask:
    """Whether fewer tokens than `min_new_tokens` are generated yet."""
    p = rows.parameters
    short: Mask = rows.positions - p["num_prompt"] < p["min_new_tokens"]
    return short


def _is_processed(rows: SamplingRows) -> Mask:
    """Whether the greatest score may lie elsewhere than in the logits."""
    return _is_penalised(rows.parameters) | _is_too_short(rows)
