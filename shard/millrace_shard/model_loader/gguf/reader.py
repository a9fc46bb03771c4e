"""Reads the values of a GGUF header in order; nothing is allocated that the rest of the file could not hold."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace_shard.errors import WeightsError

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
        """The next `num_bytes` bytes."""
        end = self.offset + num_bytes
        if end > len(self._data):
            raise WeightsError(
                f"{self._name} is cut short: its header needs {end} bytes, and the file has {len(self._data)}"
            )
        found = self._data[self.offset : end]
        self.offset = end
        return found

    def u32(self) -> int:
        """The next number of 4 bytes."""
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        """The next number of 8 bytes."""
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
                f"{self._name} announces an array of {count} strings, for which it has no room"
            )
        return [self.string() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> npt.NDArray[Any]:
        if kind not in NUMBERS:
            raise WeightsError(f"{self._name} has metadata of the unknown type {kind}")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)
