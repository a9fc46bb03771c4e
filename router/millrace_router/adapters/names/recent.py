"""A bounded mapping of what was used last."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Keeps at most `size` values for at most `seconds` each; the least recently used one goes first."""

    def __init__(
        self,
        size: int,
        *,
        seconds: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._size = size
        self._seconds = seconds
        self._clock = clock
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Key) -> Value | None:
        """Return the value of `key` if it is kept still."""
        found = self._values.get(key)
        if found is None:
            return None
        until, value = found
        if until <= self._clock():
            del self._values[key]
            return None
        self._values.move_to_end(key)
        return value

    def put(self, key: Key, value: Value, *, seconds: float | None = None) -> None:
        """Keep `value` for `seconds`, or as long as all others."""
        self._values[key] = (self._clock() + (self._seconds if seconds is None else seconds), value)
        self._values.move_to_end(key)
        while len(self._values) > self._size:
            self._values.popitem(last=False)

    def drop(self, key: Key) -> None:
        """Forget `key`, if it is kept."""
        self._values.pop(key, None)

    def kept(self) -> list[Key]:
        """Return the keys of all values that are kept still, the least recently used one first."""
        now = self._clock()
        return [key for key, (until, _) in self._values.items() if until > now]
