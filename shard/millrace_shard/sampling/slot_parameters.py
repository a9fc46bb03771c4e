"""Sampling parameters on the device by slot, and the columns of a step that are there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_proto.sampling import SCALARS
from millrace_shard.arrays import Ints
from millrace_shard.device.transfers import upload
from millrace_shard.sampling.row_indexes import RowIndexes

PENALTIES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "openai_frequency_penalty",
)
FLOATS = (
    *PENALTIES,
    *(one.name for one in SCALARS if type(one.default) is float and one.name not in PENALTIES),
)
INTS = ("top_k", "do_sample", "num_prompt")
PLACES = {name: place for place, name in enumerate((*FLOATS, *INTS))}
LARGEST = np.iinfo(np.int32).max


class SlotParameters:
    """A column of words for each slot and one for padding, written when a sequence joins. See DeviceRows."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.indexes = RowIndexes(device)
        self._words = torch.zeros(len(PLACES), num_slots + 1, dtype=torch.int32, device=device)
        self._words[PLACES["temperature"]].view(torch.float32).fill_(1.0)

    def admit(self, slots: Ints, parameters: NDArray[np.void]) -> None:
        """Write the `parameters` [n], of dtype PARAMETERS, of the sequences that take over `slots` [n]."""
        floats = np.stack([parameters[name] for name in FLOATS]).view(np.int32)
        ints = np.stack([np.minimum(parameters[name], LARGEST) for name in INTS])
        columns = np.concatenate([slots[None], floats, ints.astype(np.int32)])
        rows = upload(columns.astype(np.int32), self._words.device)
        self._words.index_copy_(1, rows[0].long(), rows[1:])

    def words(self, slots: Tensor) -> Tensor:
        """[words, n] int32 of `slots` [n]."""
        return self._words.index_select(1, slots)


@dataclass(eq=False)
class DeviceRows:
    """Columns of n rows to sample, on the device."""

    slots: Tensor
    """[n] int64."""
    positions: Tensor
    """[n] int64, as in SamplingRows."""
    uniforms: Tensor
    """[n] int64 of UNIFORM_BITS bits; without meaning where no row draws."""
    parameters: SlotParameters

    @cached_property
    def words(self) -> Tensor:
        """[words, n] int32, the parameters of the rows."""
        return self.parameters.words(self.slots)

    def column(self, name: str) -> Tensor:
        """[n, 1] float32 or int64, one parameter."""
        return parameter(self.words, name)[:, None]

    def penalties(self) -> Tensor:
        """[4, n] float32, the parameters PENALTIES."""
        return self.words[: len(PENALTIES)].view(torch.float32)

    def select(self, rows: Ints) -> DeviceRows:
        """Some of the rows, which ascend: without a copy where they are consecutive."""
        first, last = int(rows[0]), int(rows[-1])
        if len(rows) == len(self.slots):
            return self
        index: slice | Tensor = slice(first, last + 1)
        if last - first + 1 > len(rows):
            index = self.parameters.indexes(rows)
        return DeviceRows(
            slots=self.slots[index],
            positions=self.positions[index],
            uniforms=self.uniforms[index],
            parameters=self.parameters,
        )


def parameter(words: Tensor, name: str) -> Tensor:
    """[n], the parameter `name` among `words` [words, n]: float32 or int64."""
    word = words[PLACES[name]]
    return word.view(torch.float32) if name in FLOATS else word.long()
