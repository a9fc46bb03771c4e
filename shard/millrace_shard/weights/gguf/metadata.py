"""Typed access to the metadata of a GGUF file, with a record of the keys that were read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from millrace_shard.errors import WeightsError
from millrace_shard.weights.gguf.header import Value

LARGEST_COUNT = 1 << 31
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


class Metadata:
    """The metadata of the file `name`. Methods raise WeightsError, naming the key, for values of another kind."""

    def __init__(self, values: Mapping[str, Value], name: str) -> None:
        self._values = values
        self._name = name
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def unread(self, prefix: str) -> list[str]:
        return sorted(
            key for key in self._values if key.startswith(prefix) and key not in self._asked
        )

    def describe(self, key: str) -> str:
        text = repr(self._values[key])
        return f"{key}={text if len(text) <= 60 else text[:60] + '…'}"

    def text(self, key: str) -> str | None:
        """A string; None if the key is absent."""
        value = self._find(key)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(key, "a string")

    def flag(self, key: str) -> bool | None:
        """A boolean; None if the key is absent."""
        value = self._find(key)
        if value is None or isinstance(value, bool):
            return value
        raise self._wrong(key, "a boolean")

    def flags(self, key: str) -> list[bool] | None:
        """An array of booleans; None if the key is absent or has one value for all layers."""
        value = self._find(key)
        if isinstance(value, np.ndarray) and value.dtype.kind == "b":
            return [bool(each) for each in value.tolist()]
        if value is None or not isinstance(value, list | np.ndarray):
            return None
        raise self._wrong(key, "an array of booleans")

    def number(self, key: str) -> float | None:
        """A finite number above zero; None if the key is absent."""
        entry = self._find(key)
        if entry is None:
            return None
        if isinstance(entry, int | float) and not isinstance(entry, bool):
            value = _shortest(entry)
            if math.isfinite(value) and value > 0:
                return value
        raise self._wrong(key, "a finite number above zero")

    def count(self, key: str) -> int | None:
        """A whole number from 0, or an array that repeats one; None if the key is absent."""
        value = self._find(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_COUNT:
            return value
        raise self._wrong(key, "a whole number, the same for all layers")

    def needed(self, key: str) -> int:
        """A whole number from 1 of a key that must exist."""
        value = self.count(key)
        if value:
            return value
        raise WeightsError(f"{self._name} has no {key}, or it is 0")

    def texts(self, key: str) -> list[str] | None:
        """An array of strings; None if the key is absent."""
        value = self._find(key)
        if value is None or isinstance(value, list):
            return value
        raise self._wrong(key, "an array of strings")

    def counts(self, key: str) -> list[int] | None:
        """An array of whole numbers; None if the key is absent."""
        entry = self._find(key)
        if entry is None:
            return None
        if isinstance(entry, np.ndarray) and entry.dtype.kind in "iu":
            return [int(value) for value in entry.tolist()]
        raise self._wrong(key, "an array of whole numbers")

    def numbers(self, key: str) -> list[float] | None:
        """An array of finite numbers; None if the key is absent."""
        entry = self._find(key)
        if entry is None:
            return None
        if isinstance(entry, np.ndarray) and entry.dtype.kind in "iuf" and np.isfinite(entry).all():
            return [float(value) for value in entry.tolist()]
        raise self._wrong(key, "an array of finite numbers")

    def _find(self, key: str) -> Value | None:
        self._asked.add(key)
        return self._values.get(key)

    def _wrong(self, key: str, expected: str) -> WeightsError:
        return WeightsError(f"{self._name}: {self.describe(key)} must be {expected}")


def _shortest(value: float) -> float:
    """The shortest decimal that is `value` in float32: 1e-05 is stored as 9.999999747378752e-06."""
    if not abs(value) <= LARGEST_FLOAT32 or float(np.float32(value)) != value:
        return float(value)
    return float(str(np.float32(value)))
