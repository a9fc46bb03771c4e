"""Random weights of a shape, made on the model's device without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from bench.harness.checkpoints import EMBEDDING, INITIALIZER_RANGE, Shape, describe, tensor_shapes
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.device.transfers import copy_directly
from millrace_shard.errors import WeightsError
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.weights.quantized.module_tensors import Cut
from millrace_shard.weights.weights import Weights


def fill(out: Tensor, name: str) -> None:
    """Random values of a new model; the end token's row is zero, so that it is never sampled."""
    if name.endswith("norm.weight"):
        out.fill_(1)
    else:
        out.normal_(0, INITIALIZER_RANGE)
    if name == EMBEDDING:
        out[0] = 0


class RandomWeights(Weights):
    """The interface of a checkpoint's files over weights made on the device; for one rank."""

    def __init__(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> None:
        # There are no files to open.
        group = ProcessGroup.single()
        self._shapes = tensor_shapes(shape)
        self.dtype = dtype
        self._device = device
        self._copy = copy_directly
        self._rank = group.rank
        self._world_size = group.world_size
        self._views = []
        self._made = None
        self._reader = None
        self._packed = None
        self._slow = {}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def stored_names(self) -> Iterable[str]:
        """Return no names, since there are no files."""
        return ()

    def close(self) -> None:
        """Do nothing."""

    def _read_codes(self, name: str, cut: Cut) -> QuantizedTensor | None:
        """Nothing is quantised."""
        del name, cut
        return None

    def _holds_codes(self, name: str) -> bool:
        del name
        return False

    def check_layers(self, count: int) -> None:
        """Do nothing: the layers are as the config says."""

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes.get(name) != shape:
            raise WeightsError(f"tensor {name} has shape {self._shapes.get(name)}, not {shape}")

    def _fill(self, out: Tensor, name: str, shape: tuple[int, ...], span: tuple[int, int]) -> None:
        del span
        self._check(name, shape)
        fill(out, name)

    def _linear(self, name: str, cut: Cut) -> Tensor:
        (top, bottom), (left, right) = cut.rows, cut.columns
        out = self._new(bottom - top, right - left)
        self._fill(out, name, (cut.outputs, cut.inputs), cut.rows)
        return out


def read_description(folder: Path, shape: Shape) -> PretrainedConfig:
    """Write config and tokenizer of `shape` into `folder`, and load the config by `transformers`."""
    folder.mkdir(parents=True, exist_ok=True)
    describe(folder, shape)
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    found: PretrainedConfig = config
    return found
