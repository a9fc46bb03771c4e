"""The tensors of a safetensors file in memory; `safetensors` judges the file, and numpy the values.

numpy lacks bfloat16, whose values are handled by their bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.source_files import JsonObject, parse_object
from millrace_router.errors import quoted

MAX_HEADER_BYTES = 8 << 20
MAX_DIMENSIONS = 8
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_FIELDS = {"dtype", "shape", "data_offsets"}
Float32 = npt.NDArray[np.float32]

_CHUNK = 1 << 20
"""Values that are checked at a time, so that a check needs little memory."""
_BITS: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "F32": np.dtype("<u4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
}
_FIRST_NOT_FINITE = {"F32": 0x7F7F8000, "F16": 0x7C00, "BF16": 0x7F80}
"""The least bits, without the sign, of a value that is not finite; for F32, not finite as bfloat16."""
_MAGNITUDE = {"F32": 0x7FFFFFFF, "F16": 0x7FFF, "BF16": 0x7FFF}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in memory: little-endian values of `dtype` in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The tensors of a file by name."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def parse_safetensors(data: bytes) -> SafetensorsFile:
    """Read a file strictly: each byte belongs to exactly one tensor, and no key is there twice.

    Raises:
        Invalid: the file is not well-formed, or a tensor has another dtype than F32, F16 and BF16.

    """
    header = _header(data)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(one, str) for one in metadata.values()):
        raise Invalid(f"{METADATA} of the safetensors file is not an object of strings")
    for name, entry in header.items():
        _check_entry(name, entry)
    try:
        # It refuses gaps, overlaps, bytes after the last tensor, and shapes that do not fit, before it copies values.
        entries = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise Invalid(f"the safetensors file is not valid: {quoted(str(error))}") from None
    tensors = {}
    for name in header:
        entry = entries[name]
        if len(entry["shape"]) > MAX_DIMENSIONS:
            raise Invalid(f"the tensor {quoted(name)} has {len(entry['shape'])} dimensions")
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), memoryview(entry["data"]))
    return SafetensorsFile(tensors, metadata)


def _header(data: bytes) -> JsonObject:
    """Parse the header, whose length has a bound."""
    if len(data) < _LENGTH.size:
        raise Invalid("the safetensors file is cut short within its header")
    (length,) = _LENGTH.unpack_from(data)
    if length > MAX_HEADER_BYTES:
        raise Invalid(
            f"the header of the safetensors file has {length} bytes, and at most {MAX_HEADER_BYTES} are allowed"
        )
    text = data[_LENGTH.size : _LENGTH.size + length]
    if len(text) < length:
        raise Invalid("the safetensors file is cut short: its header is not whole")
    if not text.startswith(b"{"):
        raise Invalid("the header of the safetensors file does not begin with a brace")
    return parse_object(text, what="the header of the safetensors file")


def _check_entry(name: str, entry: object) -> None:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise Invalid(f"the tensor {quoted(name)} must have only dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise Invalid(
            f"the tensor {quoted(name)} has the dtype {quoted(str(dtype))}, and only {', '.join(DTYPE_BYTES)} are read"
        )


def all_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite, and stays finite when it is rounded to bfloat16."""
    bits = np.frombuffer(tensor.data, _BITS[tensor.dtype])
    magnitude, limit = _MAGNITUDE[tensor.dtype], _FIRST_NOT_FINITE[tensor.dtype]
    return all(
        bool(np.all((bits[start : start + _CHUNK] & magnitude) < limit))
        for start in range(0, bits.size, _CHUNK)
    )


def to_float32(tensor: Tensor) -> Float32:
    """Return the values in the tensor's shape, exactly."""
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    dtype = "<f4" if tensor.dtype == "F32" else "<f2"
    return np.frombuffer(tensor.data, dtype).astype(np.float32).reshape(tensor.shape)


def from_float32(values: Float32) -> Tensor:
    """Return a tensor of F32 with these values."""
    data = np.ascontiguousarray(values, dtype="<f4")
    return Tensor("F32", values.shape, bytes_of(data))


def bytes_of(values: npt.NDArray[Any]) -> memoryview:
    """Return the memory of a contiguous array."""
    return memoryview(values.reshape(-1).view(np.uint8).data)
