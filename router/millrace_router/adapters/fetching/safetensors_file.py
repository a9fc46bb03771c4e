"""Reads the header of a safetensors file strictly: every byte of the file belongs to exactly one tensor."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace_router.adapters.fetching.errors import Invalid
from millrace_router.adapters.fetching.json_text import JsonObject, parse_object
from millrace_router.errors import quoted

MAX_HEADER_BYTES = 8 << 20
MAX_DIMENSIONS = 8
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in memory: little-endian values of `dtype` in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The tensors of a file by name, as views of its bytes."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def parse_safetensors(data: bytes | bytearray) -> SafetensorsFile:
    """Check the whole header against the length of the file.

    Raises:
        Invalid: the file is not well-formed, or a tensor has another dtype than F32, F16 and BF16.

    """
    view = memoryview(data)
    if len(view) < _LENGTH.size:
        raise Invalid("the safetensors file is cut short: it has no header")
    (length,) = _LENGTH.unpack_from(view)
    if length > MAX_HEADER_BYTES:
        raise Invalid(
            f"the header of the safetensors file has {length} bytes, and at most {MAX_HEADER_BYTES} are allowed"
        )
    body = view[_LENGTH.size + length :]
    text = bytes(view[_LENGTH.size : _LENGTH.size + length])
    if len(text) < length:
        raise Invalid("the safetensors file is cut short: its header is not whole")
    if not text.startswith(b"{"):
        raise Invalid("the header of the safetensors file does not begin with a brace")
    header = parse_object(text, what="the header of the safetensors file")
    metadata = _metadata(header.pop(METADATA, {}))
    entries = {name: _entry(name, value) for name, value in header.items()}
    _check_cover(entries, len(body))
    tensors = {
        name: Tensor(entry.dtype, entry.shape, body[entry.begin : entry.end])
        for name, entry in entries.items()
    }
    return SafetensorsFile(tensors, metadata)


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Invalid(f"{METADATA} of the safetensors file is not an object of strings")
    return value


def _entry(name: str, value: object) -> _Entry:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise Invalid(f"the tensor {quoted(name)} has no dtype, shape and data_offsets alone")
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise Invalid(
            f"the tensor {quoted(name)} has the dtype {quoted(str(dtype))}, and only {', '.join(DTYPE_BYTES)} are read"
        )
    shape = _integers(name, value, "shape")
    if len(shape) > MAX_DIMENSIONS:
        raise Invalid(f"the tensor {quoted(name)} has {len(shape)} dimensions")
    offsets = _integers(name, value, "data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Invalid(f"data_offsets of the tensor {quoted(name)} are not a begin and an end")
    size = math.prod(shape) * DTYPE_BYTES[dtype]
    if size != offsets[1] - offsets[0]:
        raise Invalid(
            f"the tensor {quoted(name)} has another shape than its data_offsets have room for"
        )
    return _Entry(dtype, shape, offsets[0], offsets[1])


def _integers(name: str, entry: JsonObject, field: str) -> tuple[int, ...]:
    value: Any = entry[field]
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise Invalid(f"{field} of the tensor {quoted(name)} is not a list of natural numbers")
    return tuple(value)


def _check_cover(entries: Mapping[str, _Entry], size: int) -> None:
    """Refuse gaps between tensors, bytes that two tensors share, and bytes after the last one."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise Invalid(
                f"the tensor {quoted(name)} begins at byte {_short(entry.begin)}, not at {_short(end)}"
            )
        end = entry.end
    if end != size:
        raise Invalid(
            f"the tensors of the safetensors file end at byte {_short(end)}, and the file at {size}"
        )


def _short(number: int) -> str:
    return str(number) if number < 1 << 64 else "2^64 or beyond"
