"""A rank's part of a quantised module in a checkpoint: its tensors, with their shapes and dtypes checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.weights.safetensor_files import SafetensorFiles

Span = tuple[int, int]
"""A half-open range."""
SMALLEST_GROUP = 16
"""Inputs of the smallest group that kernels take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The outputs `rows` and the inputs `columns` of a linear [outputs, inputs]."""

    outputs: int
    inputs: int
    rows: Span
    columns: Span

    @property
    def has_all_inputs(self) -> bool:
        return self.columns == (0, self.inputs)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a rank's inputs: `index` [groups] int64 names the group of the file that each is a part of.

    All groups of the rank have `size` inputs, but the last, which may have fewer. If the rank's inputs begin inside a
    group of the file, its groups are smaller than the file's.
    """

    size: int
    index: Tensor

    @staticmethod
    def of(size: int, span: Span) -> Groups:
        """The groups of the inputs `span`, which are in groups of `size` in the file."""
        start, end = span
        if start // size == (end - 1) // size:
            return Groups(end - start, torch.tensor([start // size]))
        group_size = group_size_at(size, start)
        return Groups(group_size, torch.arange(start, end, group_size) // size)


def group_size_at(size: int, start: int) -> int:
    """The largest group size with which groups that begin at input `start` end where groups of `size` do."""
    return math.gcd(size, start)


Shape = tuple[int, ...]
KINDS = ("weight", "weight_packed", "qweight")
"""Tensors of which every linear has one."""


class ModuleTensors:
    """Reads tensors by their kind, which follows the module's name and a dot. Methods raise WeightsError."""

    def __init__(
        self, files: SafetensorFiles, module: str, on_read: Callable[[Tensor, int], None]
    ) -> None:
        """`on_read` takes each view of a file, and the bytes of its whole tensor."""
        self.module = module
        self._files = files
        self._on_read = on_read

    def __contains__(self, suffix: str) -> bool:
        return self._name(suffix) in self._files

    def names(self) -> tuple[str, ...]:
        """The module's names, in the class of transformers and in the file, by which a config may mean it."""
        names = dict.fromkeys([self.module])
        for suffix in KINDS:
            stored = self._files.stored_name(self._name(suffix))
            if stored is not None:
                names[stored.removesuffix(f".{suffix}")] = None
        return tuple(names)

    def dtype(self, suffix: str) -> torch.dtype:
        return self._files.dtype(self._name(suffix))

    def shape(self, suffix: str) -> Shape:
        return self._files.shape(self._name(suffix))

    def read(
        self,
        suffix: str,
        shapes: Sequence[Shape],
        dtypes: Sequence[torch.dtype],
        *,
        rows: Span | None = None,
    ) -> Tensor:
        """A tensor of one of `shapes` and `dtypes`, perhaps only its `rows`; a view of the file."""
        name, shape, dtype = self._name(suffix), self.shape(suffix), self.dtype(suffix)
        if dtype not in dtypes:
            names = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise self.error(suffix, f"has dtype {str(dtype).removeprefix('torch.')}, not {names}")
        if shape not in shapes:
            expected = " or ".join(str(list(each)) for each in shapes)
            raise self.error(suffix, f"has shape {list(shape)}, not {expected}")
        span = rows if shape else None
        files = self._files
        tensor = files.whole(name) if span is None else files.read(name, dim=0, span=span)
        self._on_read(tensor, self._files.stored_bytes(name))
        return tensor

    def scales(
        self,
        suffix: str,
        shapes: Sequence[Shape],
        dtypes: Sequence[torch.dtype] = (torch.float16, torch.bfloat16, torch.float32),
        *,
        rows: Span | None = None,
    ) -> Tensor:
        """A tensor of finite numbers, as float32."""
        tensor = self.read(suffix, shapes, dtypes, rows=rows).float()
        if not tensor.isfinite().all():
            raise self.error(suffix, "has values that are not finite numbers")
        return tensor

    def error(self, suffix: str, problem: str) -> WeightsError:
        """An error about a tensor, which its file holds."""
        name = self._name(suffix)
        return WeightsError(f"tensor {name} in {self._files.file_name(name)} {problem}")

    def _name(self, suffix: str) -> str:
        return f"{self.module}.{suffix}"
