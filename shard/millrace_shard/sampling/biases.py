"""What requests add to the scores of some ids: kept on the device by slot, added to all rows of a step at once."""

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
    """The biases of the rows of one step, in a line; the next step's are nearly always the same."""

    key: tuple[bytes, bytes, int]
    places: Tensor
    """[B] int64, into the scores as one line."""
    values: Tensor
    """[B] float32."""


class BiasTable:
    """Biases by slot. Used by the engine thread alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._biases: dict[int, _SlotBias] = {}
        self._layout: _Layout | None = None

    def put(self, slot: int, bias: Bias) -> None:
        """Take the biases of the sequence in `slot`, (id, what is added to its score), each id once.

        Those of the sequence before it are forgotten, also if `bias` is empty.
        """
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
        """Forget the sequences in `slots`; those without a bias are passed over."""
        self._layout = None
        for slot in slots.tolist():
            self._biases.pop(slot, None)

    def clear(self) -> None:
        """Forget every sequence."""
        self._layout = None
        self._biases.clear()

    def add(self, scores: Tensor, rows: Ints, slots: Ints) -> None:
        """Add to `rows` [n] of the scores [R, V] float32, contiguous, what their `slots` [n] ask for, in place.

        Impossible ids stay so, and finite scores stay finite.
        """
        layout = self._layout_of(rows, slots, scores.shape[1])
        line = scores.view(-1)
        before = line[layout.places]
        line[layout.places] = finite(before + layout.values, before)

    def _layout_of(self, rows: Ints, slots: Ints, size: int) -> _Layout:
        key = (rows.tobytes(), slots.tobytes(), size)
        if self._layout is None or self._layout.key != key:
            # A slot may have several rows, none of which shares an id with itself.
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
