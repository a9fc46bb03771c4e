"""The safetensors files of a checkpoint, single or sharded, opened on demand and mapped into memory."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from millrace_shard.errors import WeightsError
from millrace_shard.weights.checkpoint_files import INDEX, SINGLE, is_stale
from millrace_shard.weights.json_object import parse_json_file

ON_LINUX = sys.platform == "linux"
MAPS = Path("/proc/self/maps")


class MappedFiles:
    """The address ranges at which this process has `paths` mapped at construction (proc_pid_maps(5))."""

    def __init__(self, paths: Sequence[Path]) -> None:
        names = {str(path.resolve()) for path in paths}
        text = MAPS.read_text(errors="surrogateescape") if ON_LINUX else ""
        lines = [line.split(maxsplit=5) for line in text.split("\n")]
        self._places = [
            tuple(int(end, 16) for end in line[0].split("-"))
            for line in lines
            if line[5:] and line[5] in names
        ]

    def contains(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in a mapped file; outside Linux, true for every tensor on CPU, which may be mapped."""
        if not ON_LINUX:
            return tensor.device.type == "cpu"
        address = tensor.data_ptr()
        return any(begin <= address < end for begin, end in self._places)


def release_pages(view: Tensor) -> None:
    """Return the pages under `view`, a view into a mapped file, to the system.

    The pages stay in the page cache and are mapped again at the next access, but do not count as resident memory of
    this process. Otherwise a checkpoint would be resident twice while it is loaded. No effect outside Linux.
    """
    if not ON_LINUX or view.numel() == 0:
        return
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    begin = -(-view.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (view.data_ptr() + (last + 1) * view.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        advice = mmap.MADV_DONTNEED
        _library().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


PREFIX = "model."
FORMER_PREFIX = "transformer."
"""In place of it in older families."""
TEXT_PREFIXES = ("language_model.", "model.language_model.", "model.text_model.")
"""Prefixes of the text model in multimodal checkpoints."""
_PREFIX = "|".join(map(re.escape, TEXT_PREFIXES))
LAYER = re.compile(
    rf"(?:(?:{_PREFIX})?(?:(?:model|backbone)\.)?layers|(?:transformer\.)?(?:blocks|h))\.(\d{{1,9}})\."
)
"""Begins the names of the text model's layers."""
DENSE, SAVED_DENSE = re.compile(r"\.mlp\.(gate|up|down)_proj\."), r".block_sparse_moe.\1_proj."
"""Linears of dense layers, and as transformers saves them of Kimi Linear, with the names of layers with experts."""
ROWS_PER_PASS = 4096
"""Rows of two tensors that are compared at a time."""

PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names of safetensors."""


class SafetensorFiles:
    """The map of tensors to files. Methods raise WeightsError, naming the file, for missing or damaged files."""

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        """The files of the model in `folder`, by its index or by their names, or the one file named `single`."""
        self._open: dict[Path, Any] = {}
        self._asked: set[str] = set()
        self._paths = self._find(folder) if single == SINGLE else self._names([folder / single])

    def __contains__(self, name: str) -> bool:
        return self.stored_name(name) is not None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, *, dim: int, span: tuple[int, int]) -> Tensor:
        """Rows (dim 0) or columns (dim 1) `span` of a tensor, in the dtype of the file; a view of the mapped file."""
        rows = slice(*span)
        tensor: Tensor = self._slice(name)[rows if dim == 0 else (slice(None), rows)]
        return tensor

    def whole(self, name: str) -> Tensor:
        """A tensor of any number of axes, in the dtype of the file; a view of the mapped file."""
        stored = self._needed_name(name)
        tensor: Tensor = self._file(self._paths[stored]).get_tensor(stored)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            raise WeightsError(
                f"tensor {name} in {self.file_name(name)} has dtype {stored}, which is not supported"
            )
        return DTYPES[stored]

    def is_plain(self, name: str) -> bool:
        """Whether there is such a tensor, of floating-point numbers of 16 bits or more."""
        return name in self and self.dtype(name) in PLAIN

    def stored_name(self, name: str) -> str | None:
        """The name in the file; None if there is no such tensor."""
        bare = name.removeprefix(PREFIX).removeprefix(FORMER_PREFIX)
        others = (f"{prefix}{part}" for prefix in TEXT_PREFIXES for part in (name, bare))
        saved = DENSE.sub(SAVED_DENSE, name)
        names = name, bare, PREFIX + name, *others, saved
        stored = next((n for n in names if n in self._paths), None)
        if stored is not None:
            self._asked.add(stored)
        return stored

    def names(self) -> list[str]:
        return sorted(self._paths)

    def unread(self) -> list[str]:
        """The names in the files of all tensors that no method has read."""
        return sorted(self._paths.keys() - self._asked)

    def differ(self, name: str, other: str) -> bool:
        """Whether both tensors [n, m] are there as plain numbers, and are not equal."""
        if not (self.is_plain(name) and self.is_plain(other)):
            return False
        shape = self.shape(name)
        if self.shape(other) != shape:
            return True
        for start in range(0, shape[0], ROWS_PER_PASS):
            span = (start, min(start + ROWS_PER_PASS, shape[0]))
            one, two = (self.read(each, dim=0, span=span) for each in (name, other))
            is_equal = torch.equal(one.float(), two.float())
            self.release(one)
            self.release(two)
            if not is_equal:
                return True
        return False

    def file_name(self, name: str) -> str:
        """The name of the file that has a tensor, or of any if none has it."""
        stored = self.stored_name(name)
        return next(iter(self._paths.values())).name if stored is None else self._paths[stored].name

    def stored_bytes(self, name: str) -> int:
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def release(self, values: Tensor) -> None:
        """Release the pages under `values`, which `read` returned."""
        release_pages(values)

    def check_layers(self, count: int) -> None:
        """Raise if there are layers of the text model after the first `count`, which its config says."""
        for name in self._paths:
            match = LAYER.match(name)
            if match is not None and int(match[1]) >= count:
                raise WeightsError(
                    f"tensor {name} in {self.file_name(name)} is of layer {match[1]}, its config says {count} layers"
                )

    def paths(self) -> list[Path]:
        """The paths of all existing files, in the order of their names."""
        return sorted(path for path in set(self._paths.values()) if path.is_file())

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths())

    def close(self) -> None:
        """Drop the open files; a file is unmapped when no tensor refers to it."""
        self._open.clear()

    def _slice(self, name: str) -> Any:  # noqa: ANN401
        stored = self._needed_name(name)
        try:
            return self._file(self._paths[stored]).get_slice(stored)
        except SafetensorError as error:
            raise WeightsError(
                f"{self._paths[stored].name} lacks tensor {stored}: {error}"
            ) from error

    def _needed_name(self, name: str) -> str:
        stored = self.stored_name(name)
        if stored is None:
            raise WeightsError(f"tensor {name} is missing from the checkpoint")
        return stored

    def _find(self, folder: Path) -> dict[str, Path]:
        index, single = folder / INDEX, folder / SINGLE
        if index.is_file():
            named = _read_index(index)
            if not single.is_file() or not is_stale({path.name for path in named.values()}):
                return named
        paths = [single] if single.is_file() else sorted(folder.glob("model*.safetensors"))
        if not paths:
            raise WeightsError(f"no {SINGLE} and no {INDEX} in {folder}")
        return self._names(paths)

    def _names(self, paths: list[Path]) -> dict[str, Path]:
        return {name: path for path in paths for name in self._file(path).keys()}  # noqa: SIM118

    def _file(self, path: Path) -> Any:  # noqa: ANN401
        if path not in self._open:
            if not path.is_file():
                raise WeightsError(f"{path.name} is named by {INDEX} but not in {path.parent}")
            try:
                self._open[path] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is damaged or incomplete: {error}") from error
        return self._open[path]


def _read_index(index: Path) -> dict[str, Path]:
    try:
        names = parse_json_file(index)["weight_map"]
        files = {str(name): str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{index} is damaged: {error!r}") from error
    for file in files.values():
        if Path(file).name != file:
            raise WeightsError(f"{index} names {file}, which is not a file in its folder")
    return {name: index.parent / file for name, file in files.items()}
