"""A checkpoint's safetensors, read straight into one rank's slices: never a whole tensor where a part is wanted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.parallel import ProcessGroup

INDEX = "model.safetensors.index.json"


class Weights:
    """Tensors by name, in `dtype` on `device`, cut for this rank.

    Names are given as the checkpoint's class has them (`model.layers.0…`); a file that leaves out or adds the leading
    `model.` is read all the same. Shapes are those of the whole tensor and are checked. Every method raises
    WeightsError, naming the tensor or the file.
    """

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, device: torch.device, group: ProcessGroup
    ) -> None:
        self._files = _Files(folder)
        self._dtype = dtype
        self._device = device
        self._rank = group.rank
        self._world_size = group.world_size

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def replicated(self, name: str, shape: Sequence[int]) -> Tensor:
        """The whole tensor."""
        return self._read(name, shape, dim=0, spans=[(0, shape[0])])

    def columns(self, names: Sequence[str], shape: Sequence[int]) -> Tensor:
        """This rank's part of the outputs (dim 0) of each of `names`, all of one `shape`, one under another."""
        share = shape[0] // self._world_size
        span = (self._rank * share, (self._rank + 1) * share)
        return torch.cat([self._read(name, shape, dim=0, spans=[span]) for name in names])

    def rows(self, name: str, shape: Sequence[int]) -> Tensor:
        """This rank's part of the inputs (dim 1)."""
        share = shape[1] // self._world_size
        return self._read(name, shape, dim=1, spans=[(self._rank * share, (self._rank + 1) * share)])
