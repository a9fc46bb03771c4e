"""The header of a GGUF file: metadata and the places of tensors, checked against the size of the file.

Format: magic, version, two counts, key-value pairs, tensor infos, padding, then the data of the tensors. All numbers
are little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace_shard.errors import UnsupportedModel, WeightsError
from millrace_shard.weights.gguf.block_formats import BlockFormat, find_format

Value = int | float | bool | str | list[str] | npt.NDArray[Any]
"""A value of the metadata: arrays of strings are lists, arrays of numbers are arrays of numpy."""

U32, STRING, ARRAY = 4, 8, 9
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Numpy's name of every type of number."""
MAX_STRINGS = 1 << 21
"""Strings of an array: an empty one takes 8 bytes of the file and more in memory."""


class Reader:
    """A position in a mapped file. Methods raise WeightsError, naming the file, at its end or for unknown types."""

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self.offset = 0
        self._data = data
        self._name = name

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > len(self._data):
            raise WeightsError(
                f"{self._name} is cut short: its header needs {end} bytes, and the file has {len(self._data)}"
            )
        data = self._data[self.offset : end]
        self.offset = end
        return data

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        """The next string: its length, then UTF-8."""
        text = self.take(self.u64())
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise WeightsError(
                f"{self._name} has a string that is not UTF-8 before byte {self.offset} of its header"
            ) from error

    def value(self) -> Value:
        """The next value: its type, then its bytes."""
        kind = self.u32()
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self._array()
        number: int | float | bool = self._numbers(kind, 1)[0].item()
        return number

    def _array(self) -> list[str] | npt.NDArray[Any]:
        kind, count = self.u32(), self.u64()
        if kind != STRING:
            return self._numbers(kind, count)
        if count > min(MAX_STRINGS, (len(self._data) - self.offset) // 8):
            raise WeightsError(
                f"{self._name} announces an array of {count} strings, more than it can hold"
            )
        return [self.string() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in NUMBERS:
            raise WeightsError(f"{self._name} has metadata of the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
LARGEST_ALIGNMENT = 1 << 20
MAX_ENTRIES = 1 << 16
MAX_DIMENSIONS = 4
SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file: its shape, outputs first, its format, and the offset of its first byte."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; a vector is one row."""
        return self.shape[-1] // self.format.elements * self.format.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key and tensors by name. `num_bytes` is the size of the header, `size` the file's."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]
    num_bytes: int
    size: int

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read and check the header of `path`.

        Raises WeightsError for a damaged file, and UnsupportedModel for a version, a format of blocks or a split file
        that is not supported.
        """
        try:
            with path.open("rb") as file:
                if not path.stat().st_size:
                    raise WeightsError(f"{path.name} is empty")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _parse(path, data)
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> GgufHeader:
    reader = Reader(data, path.name)
    _check_start(reader, path)
    num_tensors, num_entries = reader.u64(), reader.u64()
    if max(num_tensors, num_entries) > MAX_ENTRIES:
        raise WeightsError(
            f"{path.name} announces {num_tensors} tensors and {num_entries} entries of metadata;"
            f" at most {MAX_ENTRIES} are allowed"
        )
    metadata: dict[str, Value] = {}
    for _ in range(num_entries):
        key = reader.string()
        if key in metadata:
            raise WeightsError(f"{path.name} has the metadata {key} twice")
        metadata[key] = reader.value()
    _refuse_split(path, metadata)
    tensors = [_tensor(reader, path) for _ in range(num_tensors)]
    alignment = _alignment(path, metadata)
    start = -(-reader.offset // alignment) * alignment
    tensors = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    _check_places(path, tensors, alignment=alignment, size=len(data))
    by_name = {tensor.name: tensor for tensor in tensors}
    return GgufHeader(path, metadata, by_name, reader.offset, len(data))


def _check_start(reader: Reader, path: Path) -> None:
    """Raise unless the file begins with the magic and a known version."""
    if reader.take(len(MAGIC)) != MAGIC:
        raise WeightsError(
            f"{path.name} is not a GGUF file: it does not begin with GGUF; other checkpoints are folders of safetensors"
        )
    version = reader.u32()
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise UnsupportedModel(f"{path.name} is big-endian; little-endian GGUF files are supported")
    raise UnsupportedModel(
        f"{path.name} has version {version} of GGUF; these are supported: {', '.join(map(str, VERSIONS))}"
    )


def _refuse_split(path: Path, metadata: Mapping[str, Value]) -> None:
    parts = metadata.get("split.count", 0)
    if SPLIT_NAME.search(path.name) or (isinstance(parts, int) and parts > 1):
        raise UnsupportedModel(
            f"{path.name} is a part of a split file; merge the parts with: llama-gguf-split --merge"
        )


def _tensor(reader: Reader, path: Path) -> StoredTensor:
    """The next tensor info; its offset counts from the start of the data."""
    name, num_dimensions = reader.string(), reader.u32()
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise WeightsError(f"tensor {name} in {path.name} has {num_dimensions} dimensions")
    shape = tuple(reader.u64() for _ in range(num_dimensions))[::-1]
    block_format = find_format(reader.u32(), name)
    if min(shape) < 1 or shape[-1] % block_format.elements:
        raise WeightsError(
            f"tensor {name} in {path.name} has shape {list(shape)}, which is not made of blocks of"
            f" {block_format.elements}"
        )
    return StoredTensor(name, shape, block_format, reader.u64())


def _alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or not 0 < alignment <= LARGEST_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise WeightsError(
            f"general.alignment of {path.name} is {alignment!r}, which is not a power of two up to {LARGEST_ALIGNMENT}"
        )
    return alignment


def _check_places(
    path: Path, tensors: Sequence[StoredTensor], *, alignment: int, size: int
) -> None:
    """Raise WeightsError unless every tensor is aligned, inside the file, named once and apart from the others."""
    end, names = 0, set()
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.name in names:
            raise WeightsError(f"{path.name} has tensor {tensor.name} twice")
        if tensor.offset % alignment:
            raise WeightsError(f"tensor {tensor.name} in {path.name} is not aligned to {alignment}")
        if tensor.offset < end:
            raise WeightsError(f"tensor {tensor.name} in {path.name} overlaps another one")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise WeightsError(
                f"{path.name} is cut short: tensor {tensor.name} ends at byte {end}, and the file at {size}"
            )
        names.add(tensor.name)
