"""Values of tensors as numpy arrays; bfloat16, which numpy lacks, by its bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millrace_router.adapters.fetching.safetensors_file import Tensor

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


def all_finite(tensor: Tensor) -> bool:
    """Whether every value is finite, and stays finite when it is rounded to bfloat16."""
    bits = np.frombuffer(tensor.data, _BITS[tensor.dtype])
    magnitude, limit = _MAGNITUDE[tensor.dtype], _FIRST_NOT_FINITE[tensor.dtype]
    return all(
        bool(np.all((bits[start : start + _CHUNK] & magnitude) < limit))
        for start in range(0, bits.size, _CHUNK)
    )


def to_float32(tensor: Tensor) -> Float32:
    """The values in the tensor's shape, exactly."""
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(tensor.shape)
    dtype = "<f4" if tensor.dtype == "F32" else "<f2"
    return np.frombuffer(tensor.data, dtype).astype(np.float32).reshape(tensor.shape)


def from_float32(values: Float32) -> Tensor:
    """A tensor of F32 with these values."""
    data = np.ascontiguousarray(values, dtype="<f4")
    return Tensor("F32", values.shape, bytes_of(data))


def bytes_of(values: npt.NDArray[Any]) -> memoryview:
    """The memory of a contiguous array."""
    return memoryview(values.reshape(-1).view(np.uint8).data)
