"""The header of a GGUF file: metadata and the places of tensors, checked against the size of the file.

Format: magic, version, two counts, key-value pairs, tensor infos, padding, then the data of the tensors. All numbers
are little-endian.
"""

from __future__ import annotations

import math
import mmap
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

MAX_NUMBERS = 1 << 22
"""Numbers of an array: more than any vocabulary has tokens."""


class Reader:
    """A position in a mapped file. Methods raise WeightsError, naming the file, at its end or for unknown types."""

    def __init__(self, data: mmap.mmap | bytes, name: str, *, skips_lists: bool = False) -> None:
        """`skips_lists`: arrays of strings are empty lists, which takes a tenth of the time."""
        self.offset = 0
        self._data = data
        self._name = name
        self._skips_lists = skips_lists

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
        if self._skips_lists:
            self._skip_strings(count)
            return []
        return [self.string() for _ in range(count)]

    def _skip_strings(self, count: int) -> None:
        length_at, offset = struct.Struct("<Q").unpack_from, self.offset
        try:
            for _ in range(count):
                offset += 8 + length_at(self._data, offset)[0]
        except struct.error:
            # The length of a string lies beyond the end.
            offset += 8
        self.take(offset - self.offset)

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in NUMBERS:
            raise WeightsError(f"{self._name} has metadata of the unknown type {kind}")
        if count > MAX_NUMBERS:
            raise WeightsError(f"{self._name} announces an array of {count} numbers")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
LARGEST_ALIGNMENT = 1 << 20
MAX_ENTRIES = 1 << 16
MAX_DIMENSIONS = 4
SPLIT_KEYS = {"no": 0, "count": 1}
"""Keys of the metadata of a part, and their values for a file that is not split."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file: its shape, outputs first, its format, and the offset of its first byte."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    part: int = 0
    """The number of its file, from 0."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; a vector is one row."""
        return self.shape[-1] // self.format.elements * self.format.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def element(self, index: int) -> StoredTensor:
        """One of the tensors that this one stacks."""
        part = replace(self, shape=self.shape[1:])
        return replace(part, offset=self.offset + index * part.num_bytes)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key and tensors by name; the first part of a split file has the metadata."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]
    num_bytes: tuple[int, ...]
    """Of the header of each file."""
    size: int
    """Bytes of all files."""

    @property
    def path(self) -> Path:
        """The first file."""
        return self.paths[0]

    @classmethod
    def read(cls, *paths: Path, with_lists: bool = True) -> GgufHeader:
        """Read and check the headers of a file, or of all parts of a split one in their order.

        Without `with_lists` the lists of strings in the metadata are left out, which are its tokens and merges.

        Raises WeightsError for damaged files and for parts that do not belong together, and UnsupportedModel for a
        version or a format of blocks that is not supported.
        """
        headers = [cls._read(path, with_lists=with_lists) for path in paths]
        for number, header in enumerate(headers):
            _check_part(header, number, len(paths))
        if len(headers) == 1:
            return headers[0]
        return cls(
            paths,
            headers[0].metadata,
            _all_tensors(headers),
            tuple(size for header in headers for size in header.num_bytes),
            sum(header.size for header in headers),
        )

    @classmethod
    def _read(cls, path: Path, *, with_lists: bool) -> GgufHeader:
        try:
            with path.open("rb") as file:
                if not path.stat().st_size:
                    raise WeightsError(f"{path.name} is empty")
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    return _parse(path, data, with_lists=with_lists)
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, data: mmap.mmap, *, with_lists: bool) -> GgufHeader:
    reader = Reader(data, path.name, skips_lists=not with_lists)
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
    if not with_lists:
        metadata = {key: value for key, value in metadata.items() if not isinstance(value, list)}
    tensors = [_tensor(reader, path) for _ in range(num_tensors)]
    alignment = _alignment(path, metadata)
    start = -(-reader.offset // alignment) * alignment
    tensors = [replace(tensor, offset=start + tensor.offset) for tensor in tensors]
    _check_places(path, tensors, alignment=alignment, size=len(data))
    by_name = {tensor.name: tensor for tensor in tensors}
    return GgufHeader((path,), metadata, by_name, (reader.offset,), len(data))


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


def _check_part(header: GgufHeader, number: int, count: int) -> None:
    """Raise WeightsError unless the file is part `number`, from 0, of `count`."""
    name = header.path.name
    stored = [header.metadata.get(f"split.{key}", default) for key, default in SPLIT_KEYS.items()]
    are_whole = all(isinstance(each, int) for each in stored)
    if are_whole and stored[1] == 0:
        stored[1] = 1
    if are_whole and stored == [number, count]:
        return
    if not are_whole or count > 1:
        raise WeightsError(
            f"{name} is part {number + 1} of {count} by its name, and by its metadata it has"
            f" split.no={stored[0]!r} and split.count={stored[1]!r}"
        )
    raise WeightsError(
        f"{name} is a part of a split file of {stored[1]}: give all of them names that end in"
        f" -00001-of-{stored[1]:05d}.gguf and so on, or merge them with: llama-gguf-split --merge"
    )


def _all_tensors(headers: Sequence[GgufHeader]) -> dict[str, StoredTensor]:
    """The tensors of all parts. Raises WeightsError if parts have the same ones, or not as many as the first says."""
    tensors: dict[str, StoredTensor] = {}
    for part, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise WeightsError(
                    f"tensor {name} is in {headers[tensors[name].part].path.name} and in {header.path.name}"
                )
            tensors[name] = replace(tensor, part=part)
    total = headers[0].metadata.get("split.tensors.count")
    if total is not None and not (isinstance(total, int) and total == len(tensors)):
        raise WeightsError(
            f"{headers[0].path.name} announces {total} tensors in its {len(headers)} parts, which have {len(tensors)}"
        )
    return tensors


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
