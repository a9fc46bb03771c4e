"""The images in the prompts of a batch: which rows of features replace the embeddings of which tokens, and which later
tokens these see.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import ImageSpan, Sequence
from millrace_shard.device.transfers import upload, upload_columns
from millrace_shard.errors import StepInvalid
from millrace_shard.kernels.ragged import RaggedBatch, ReplacedRows


class Mask(Enum):
    """Which later tokens the tokens of a prompt attend to."""

    CAUSAL = "causal"
    """None."""
    IMAGE = "image"
    """Those of an image to all tokens of the same image."""
    PROMPT = "prompt"
    """Those of a prompt to all of it, with or without images; tokens that follow attend to earlier ones."""


class FeatureRows:
    """Features of images by row, of which only the router says what they hold."""

    def __init__(
        self, values: Tensor, token_id: int, mask: Mask = Mask.CAUSAL, *, has_axes: bool = False
    ) -> None:
        """`values` [rows, hidden] may be uninitialised; `token_id` is the placeholder.

        `has_axes` is whether tokens of an image have its rows and columns as positions.
        """
        self.values = values
        self.has_axes = has_axes
        self.token_id = token_id
        self.mask = mask
        self._written = np.zeros(len(values), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._written)

    def write(self, first: int, features: Tensor) -> None:
        """Fill the rows from `first` on, after all work submitted so far."""
        rows = slice(first, first + len(features))
        self.values[rows] = features
        self._written[rows] = True

    def take(self, rows: Ints) -> Tensor:
        """[n, hidden], the features in `rows` [n]; NaN in those that were never written, so that a sequence fails."""
        (index,) = upload_columns([rows], self.values.device)
        taken = self.values.index_select(0, index)
        if not (written := self._written[rows]).all():
            taken[torch.from_numpy(~written).to(taken.device)] = torch.nan
        return taken


class _Axes:
    """The positions of a sequence with images of any size on the axes of time, rows and columns."""

    def __init__(self, sequence: Sequence) -> None:
        """Text goes on after the largest position before it."""
        end, position, parts = 0, 0, list[Ints]()
        for grid in sequence.image_grids:
            parts.append(np.tile(np.arange(end, grid.position) - end + position, (3, 1)))
            position += grid.position - end
            rows, columns = np.divmod(np.arange(grid.rows * grid.columns), grid.columns)
            parts.append(np.stack([np.zeros_like(rows), rows, columns]) + position)
            position += max(grid.rows, grid.columns)
            end = grid.position + grid.rows * grid.columns
        self._first = np.concatenate(parts, axis=1)
        """[3, tokens up to the end of the last image]."""
        self.shift = position - end
        """What a later token's position differs by from its index."""

    def of(self, start: int, count: int) -> Ints:
        """[3, count], of the tokens from `start` on."""
        known = self._first[:, start : start + count]
        later = np.arange(start + known.shape[1], start + count) + self.shift
        return np.concatenate([known, np.tile(later, (3, 1))], axis=1)


class SequenceImages:
    """The images of each slot; nothing is done for models that read none."""

    def __init__(self, features: FeatureRows | None, device: torch.device, num_slots: int) -> None:
        """Without `features`, a sequence with images is invalid."""
        self._features = features
        self._device = device
        self._rows: dict[int, Ints] = {}
        """By slot: for each input token its row of features, or -1."""
        self._ends: dict[int, Ints] = {}
        """By slot, if tokens see later ones: for its first input tokens the position after the last that each sees."""
        self._axes: dict[int, _Axes] = {}
        """By slot, of sequences with images of any size."""
        self._shifts: Tensor | None = None
        """[slots] int64, what positions of decoded tokens differ by from their indexes; None: by nothing."""
        if features is not None and features.has_axes:
            self._shifts = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def clear(self) -> None:
        self._rows.clear()
        self._ends.clear()
        self._axes.clear()
        if self._shifts is not None:
            self._shifts.zero_()

    def drop(self, slots: Ints) -> None:
        if self._rows or self._ends or self._axes:
            for slot in slots.tolist():
                self._rows.pop(slot, None)
                self._ends.pop(slot, None)
                if self._axes.pop(slot, None) is not None and self._shifts is not None:
                    self._shifts[slot].zero_()

    def check(self, sequence: Sequence) -> None:
        """Raise StepInvalid unless spans name rows of features and placeholder tokens, one after the other."""
        features, name, end = self._features, f"request {sequence.request_id}", 0
        for grid in sequence.image_grids:
            size = grid.rows * grid.columns
            if grid.position < end or not 0 < size <= sequence.num_inputs - grid.position:
                raise StepInvalid(f"{name} has grids that overlap or lie outside of its tokens")
            end = grid.position + size
        if not sequence.images:
            return
        end = 0
        if features is None:
            raise StepInvalid(f"{name} has images, and the model reads none")
        for span in sequence.images:
            if span.position < end or not 0 < span.tokens <= sequence.num_inputs - span.position:
                raise StepInvalid(f"{name} has images that overlap or lie outside of its tokens")
            end = span.position + span.tokens
            if span.first_row + span.tokens > len(features):
                raise StepInvalid(f"{name} has images beyond the {len(features)} rows of features")
            if (sequence.input_ids[span.position : end] != features.token_id).any():
                raise StepInvalid(f"{name} has an image where its tokens are not placeholders")

    def admit(self, sequence: Sequence) -> None:
        if sequence.images:
            self._rows[sequence.slot] = _rows_of(sequence.images, sequence.num_inputs)
        if sequence.image_grids and self._shifts is not None:
            axes = self._axes[sequence.slot] = _Axes(sequence)
            self._shifts[sequence.slot].fill_(axes.shift)
        mask = Mask.CAUSAL if self._features is None else self._features.mask
        if mask is Mask.PROMPT:
            num_prompt = sequence.num_inputs - sequence.generated_tokens
            self._ends[sequence.slot] = np.full(num_prompt, num_prompt)
        elif mask is Mask.IMAGE and sequence.images:
            self._ends[sequence.slot] = _ends_of(sequence.images)

    def with_ends(
        self, ragged: RaggedBatch, slots: Ints, starts: Ints, counts: Ints
    ) -> RaggedBatch:
        """`ragged`, a step with `counts` [B] tokens of `slots` [B] from `starts` [B] on, with what each query sees.

        Raises StepInvalid for a chunk that ends before tokens that its own ones see.
        """
        if not self._ends:
            return ragged
        rows = list(zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True))
        if not any(start < len(self._ends.get(slot, ())) for slot, start, _ in rows):
            return ragged
        ends = [np.arange(start + 1, start + count + 1) for _, start, count in rows]
        for own, (slot, start, count) in zip(ends, rows, strict=True):
            later = self._ends.get(slot, own[:0])[start : start + count]
            own[: len(later)] = later
            if own[-1] > start + count:
                raise StepInvalid("a chunk ends before tokens that its own ones see")
        key_ends = upload(np.concatenate(ends).astype(np.int32), ragged.positions.device)
        windows = tuple(replace(window, key_ends=key_ends) for window in ragged.windows)
        return replace(ragged, key_ends=key_ends, windows=windows)

    def decoded_axes(self, slots: Tensor, starts: Tensor) -> Tensor | None:
        """`axes` of one token of each slot after its inputs, of tensors on the device, for graphs."""
        if self._shifts is None:
            return None
        return (starts + self._shifts[slots]).expand(3, len(slots))

    def axes(self, slots: Ints, starts: Ints, counts: Ints) -> Tensor | None:
        """The positions [3, T] of `counts` [B] tokens of `slots` [B] from `starts` [B] on; None: their indexes."""
        if self._axes.keys().isdisjoint(slots.tolist()):
            return None
        rows = zip(slots.tolist(), starts.tolist(), counts.tolist(), strict=True)
        parts = [
            self._axes[slot].of(start, count)
            if slot in self._axes
            else np.tile(np.arange(start, start + count), (3, 1))
            for slot, start, count in rows
        ]
        whole = np.concatenate(parts, axis=1)
        (positions,) = upload_columns([whole.reshape(-1)], self._device)
        return positions.view(whole.shape)

    def rows(self, slots: Ints, starts: Ints, counts: Ints) -> ReplacedRows | None:
        """The features for `counts` [B] tokens of `slots` [B] from `starts` [B] on, the first tokens of a step.

        None if none of them stands for a part of an image.
        """
        features = self._features
        if features is None or not self._rows:
            return None
        named = [
            self._rows[slot][start : start + count]
            if slot in self._rows
            else np.full(count, -1, dtype=np.int64)
            for slot, start, count in zip(
                slots.tolist(), starts.tolist(), counts.tolist(), strict=True
            )
        ]
        rows = np.concatenate([*named, np.empty(0, dtype=np.int64)])
        tokens = np.flatnonzero(rows >= 0)
        if not len(tokens):
            return None
        (index,) = upload_columns([tokens], features.values.device)
        return ReplacedRows(index, features.take(rows[tokens]))


def _rows_of(spans: Many[ImageSpan], num_tokens: int) -> Ints:
    rows = np.full(num_tokens, -1, dtype=np.int64)
    for span in spans:
        rows[span.position : span.position + span.tokens] = span.first_row + np.arange(span.tokens)
    return rows


def _ends_of(spans: Many[ImageSpan]) -> Ints:
    ends = np.arange(1, 1 + max(span.position + span.tokens for span in spans))
    for span in spans:
        end = span.position + span.tokens
        ends[span.position : end] = end
    return ends
