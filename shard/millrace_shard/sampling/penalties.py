"""Penalties, biases and forbidden ids over rows of scores, and counts of tokens. Rows are independent and exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.scores import SamplingKernels
from millrace_shard.sampling.sampling_rows import PENALTIES, SamplingRows

_GENERATED = 1 << 32
"""One int64 holds two counts of an id: of all tokens in the low half, of generated tokens in the high half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of n rows, each [n, 1] float32 on the scores' device."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    openai_frequency: Tensor
    uses_counts: bool
    """Whether any row has a penalty that depends on the counts of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTokens:
    """The tokens of n sequences: the prompt, then the generated tokens."""

    ids: Tensor
    """[n, L] int64; undefined past a row's length."""
    lengths: Tensor
    """[n, 1] int64, at least 1."""
    num_prompt: Tensor
    """[n, 1] int64, the length of the prompt."""


def penalise(scores: Tensor, rows: Tensor, tokens: PastTokens, penalties: Penalties) -> None:
    """Apply the repetition, frequency, presence and OpenAI frequency penalties to `rows` [n] of scores [R, V] float32.

    The order is as named, the change in place, and only ids that a sequence contains change. Finite scores stay finite,
    however large a penalty is, and minus infinity stays.
    """
    columns = torch.arange(tokens.ids.shape[1], device=scores.device)
    held = columns < tokens.lengths
    # Padding is replaced by the row's first token: the same value is then written to its score several times.
    ids = torch.where(held, tokens.ids, tokens.ids[:, :1])
    line = scores.view(-1)
    index = rows[:, None] * scores.shape[1] + ids
    before = line[index]
    penalty = penalties.repetition
    after = finite(torch.where(before < 0, before * penalty, before / penalty), before)
    if penalties.uses_counts:
        is_generated = columns >= tokens.num_prompt
        ones = held * torch.where(is_generated, 1 + _GENERATED, 1)
        counted = torch.zeros(len(ids), scores.shape[1], dtype=torch.int64, device=scores.device)
        counts = counted.scatter_add_(1, ids, ones).gather(1, ids)
        in_all = (counts & (_GENERATED - 1)).to(torch.float32)
        generated = (counts >> 32).to(torch.float32)
        after = finite(after - penalties.frequency * in_all / tokens.lengths, after)
        after = finite(after - penalties.presence * (generated > 0), after)
        after = finite(after - penalties.openai_frequency * generated, after)
    line[index] = after


def finite(changed: Tensor, before: Tensor) -> Tensor:
    """`changed` scores, clamped to finite values, but equal to `before` where that is infinite."""
    limits = torch.finfo(changed.dtype)
    return torch.where(before.isinf(), before, changed.clamp_(limits.min, limits.max))


def forbid(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Set the scores of `ids` [m] in `rows` [n] to minus infinity, in place."""
    scores[rows[:, None], ids[None, :]] = float("-inf")


def forbid_if_others(scores: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Forbid `ids` as `forbid` does, except in rows that would have no possible token left."""
    index = (rows[:, None], ids[None, :])
    before = scores[index]
    scores[index] = float("-inf")
    has_others = scores.index_select(0, rows).amax(-1, keepdim=True) > float("-inf")
    # With a NaN in the row the comparison is false: the scores stay as they are, and the row fails.
    scores[index] = torch.where(has_others, float("-inf"), before)


Bias = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _SlotBias:
    ids: Tensor
    """[b] int64."""
    values: Tensor
    """[b] float32."""


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """The biases of all rows of one step, concatenated. Consecutive steps usually have the same rows."""

    key: tuple[bytes, bytes, int]
    index: Tensor
    """[B] int64, indexes into the flattened scores."""
    values: Tensor
    """[B] float32."""


class BiasTable:
    """Biases by slot. Only the engine thread uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._biases: dict[int, _SlotBias] = {}
        self._layout: _Layout | None = None

    def put(self, slot: int, bias: Bias) -> None:
        """Replace the biases of `slot` by `bias`, which may be empty: pairs of a distinct id and the value to add."""
        self._layout = None
        if not bias:
            self._biases.pop(slot, None)
            return
        ids, values = zip(*bias, strict=True)
        self._biases[slot] = _SlotBias(
            upload(np.array(ids, dtype=np.int64), self._device),
            upload(np.array(values, dtype=np.float32), self._device),
        )

    def drop(self, slots: Ints) -> None:
        """Remove the biases of `slots`; slots without a bias are ignored."""
        self._layout = None
        for slot in slots.tolist():
            self._biases.pop(slot, None)

    def clear(self) -> None:
        self._layout = None
        self._biases.clear()

    def add(self, scores: Tensor, rows: Ints, slots: Ints) -> None:
        """Add the biases of `slots` [n] to `rows` [n] of the scores [R, V] float32, contiguous, in place.

        Finite scores stay finite, and infinite scores are unchanged.
        """
        layout = self._layout_of(rows, slots, scores.shape[1])
        line = scores.view(-1)
        before = line[layout.index]
        line[layout.index] = finite(before + layout.values, before)

    def _layout_of(self, rows: Ints, slots: Ints, size: int) -> _Layout:
        key = (rows.tobytes(), slots.tobytes(), size)
        if self._layout is None or self._layout.key != key:
            # A slot may have several rows, but the ids within a row are distinct.
            parts = [self._biases[slot] for slot in slots.tolist()]
            starts = np.repeat(rows * size, [len(part.ids) for part in parts])
            self._layout = _Layout(
                key,
                torch.cat([part.ids for part in parts]) + upload(starts, self._device),
                torch.cat([part.values for part in parts]),
            )
        return self._layout


class TokenCounts:
    """Counts by slot, so that a step counts only the tokens since the previous one. Only the engine thread uses it.

    The table is allocated at the first use, with 8 bytes for each id of each slot.
    """

    def __init__(self, token_table: Tensor, kernels: SamplingKernels) -> None:
        """`token_table` [slots, length] int32."""
        self._table = token_table
        self._kernels = kernels
        self._counts: Tensor | None = None
        self._num_counted = np.zeros(len(token_table), dtype=np.int64)
        """[slots], the tokens of each slot that are counted; 0 means that its counts are undefined."""

    def forget(self, slot: int) -> None:
        self._num_counted[slot] = 0

    def penalise(self, scores: Tensor, chosen: Ints, rows: SamplingRows) -> None:
        """Penalise the rows `chosen` [n] of `scores` [R, V] float32, contiguous, in place; they are `rows`."""
        slots, index = np.unique(rows.table_rows, return_inverse=True)
        # A slot may have rows at several positions. The tokens past the first position are draft tokens, not counted.
        ends = np.full(len(slots), np.iinfo(np.int64).max)
        np.minimum.at(ends, index, rows.positions)
        prompts = rows.parameters["num_prompt"]
        num_prompt = np.empty_like(slots)
        num_prompt[index] = prompts
        counts = self._count(slots, ends, num_prompt, scores.shape[1])
        columns = np.stack([chosen, rows.table_rows, ends[index], rows.positions, prompts])
        self._kernels.penalise(
            scores, counts, self._table, upload(columns, scores.device), _penalties(rows, scores)
        )

    def _count(self, slots: Ints, ends: Ints, num_prompt: Ints, size: int) -> Tensor:
        """The counts [all slots, `size`] int64, of `slots` up to the positions `ends`, all [m]."""
        device = self._table.device
        if self._counts is None:
            self._counts = torch.empty(len(self._table), size, dtype=torch.int64, device=device)
        begins = self._num_counted[slots]
        begins[begins > ends] = 0
        if len(new := slots[begins == 0]):
            self._counts.index_fill_(0, upload(new, device), 0)
        spans = np.stack([slots, begins, ends, num_prompt])[:, begins < ends]
        if spans.shape[1]:
            longest = int((ends - begins).max())
            self._kernels.count_tokens(self._counts, self._table, upload(spans, device), longest)
        self._num_counted[slots] = ends
        return self._counts


def _penalties(rows: SamplingRows, scores: Tensor) -> Tensor:
    """[4, n] float32 on the device of `scores`."""
    if rows.device is not None:
        return rows.device.penalties()
    return upload(np.stack([rows.parameters[name] for name in PENALTIES]), scores.device)
