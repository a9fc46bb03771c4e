"""The sequences that yield no token, by slot."""

from __future__ import annotations

import numpy as np

from millrace_proto.sequence import Pooling
from millrace_shard.arrays import Flags, Ints


class PooledSequences:
    """The pooling of each slot that has one."""

    def __init__(self, size: int) -> None:
        self._flags = np.zeros(size, dtype=np.bool_)
        self._poolings: dict[int, Pooling] = {}

    def admit(self, slot: int, pooling: Pooling | None) -> None:
        """Note the pooling of a new sequence, in place of that of an earlier one in its slot."""
        if pooling is not None:
            self._flags[slot] = True
            self._poolings[slot] = pooling
        elif self._poolings.pop(slot, None) is not None:
            self._flags[slot] = False

    def are_pooled(self, slots: Ints) -> Flags:
        """[n], whether each of `slots` [n] yields no token."""
        flags: Flags = self._flags[slots]
        return flags

    def of(self, slot: int) -> Pooling:
        """The pooling of `slot`, which has one."""
        return self._poolings[slot]
