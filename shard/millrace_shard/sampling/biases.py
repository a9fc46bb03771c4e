"""Logit biases of requests, kept on the device by slot and added to all rows of a step at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.sampling.penalties import finite

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
    places: Tensor
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
            self._upload(np.array(ids, dtype=np.int64)),
            self._upload(np.array(values, dtype=np.float32)),
        )

    def drop(self, slots: Ints) -> None:
        """Remove the biases of `slots`; slots without a bias are ignored."""
        self._layout = None
        for slot in slots.tolist():
            self._biases.pop(slot, None)

    def clear(self) -> None:
        """Remove all biases."""
        self._layout = None
        self._biases.clear()

    def add(self, scores: Tensor, rows: Ints, slots: Ints) -> None:
        """Add the biases of `slots` [n] to `rows` [n] of the scores [R, V] float32, contiguous, in place.

        Finite scores stay finite, and infinite scores are unchanged.
        """
        layout = self._layout_of(rows, slots, scores.shape[1])
        line = scores.view(-1)
        before = line[layout.places]
        line[layout.places] = finite(before + layout.values, before)

    def _layout_of(self, rows: Ints, slots: Ints, size: int) -> _Layout:
        key = (rows.tobytes(), slots.tobytes(), size)
        if self._layout is None or self._layout.key != key:
            # A slot may have several rows, but the ids within a row are distinct.
            parts = [self._biases[slot] for slot in slots.tolist()]
            starts = np.repeat(rows * size, [len(part.ids) for part in parts])
            self._layout = _Layout(
                key,
                torch.cat([part.ids for part in parts]) + self._upload(starts),
                torch.cat([part.values for part in parts]),
            )
        return self._layout

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return upload(values, self._device)
