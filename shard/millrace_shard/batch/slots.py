"""The slots that hold a sequence, and whether this sequence is valid."""

from __future__ import annotations

import numpy as np

from millrace_shard.arrays import Flags, Ints
from millrace_shard.errors import StepInvalid


class Slots:
    """A table of slots. An invalid sequence also holds its slot until it is dropped."""

    def __init__(self, size: int) -> None:
        self._in_use = np.zeros(size, dtype=np.bool_)
        self._is_invalid = np.zeros(size, dtype=np.bool_)
        self._admissions = np.zeros(size, dtype=np.int64)
        """The number of sequences that each slot has held; it identifies late results of an earlier sequence."""

    @property
    def num_in_use(self) -> int:
        """The number of slots that hold a sequence."""
        return int(self._in_use.sum())

    def clear(self) -> None:
        """Free all slots."""
        self._in_use[:] = False

    def take(self, slot: int, *, is_valid: bool) -> None:
        """Put a sequence into `slot`, which must be free. Raises StepInvalid."""
        size = len(self._in_use)
        if not 0 <= slot < size:
            raise StepInvalid(f"slot {slot} is not one of {size}")
        if self._in_use[slot]:
            raise StepInvalid(f"slot {slot} is in use")
        self._in_use[slot] = True
        self._is_invalid[slot] = not is_valid
        self._admissions[slot] += 1

    def free(self, slots: Ints) -> None:
        """Free `slots`."""
        self._in_use[slots] = False

    def is_valid(self, slot: int) -> bool:
        """Whether `slot` holds a valid sequence."""
        return bool(self._in_use[slot] and not self._is_invalid[slot])

    def invalid(self, slots: Ints) -> Flags:
        """[n], whether each of `slots` [n], all in use, holds an invalid sequence."""
        flags: Flags = self._is_invalid[slots]
        return flags

    def admissions(self, slots: Ints) -> Ints:
        """[n], the admission number of the sequence in each of `slots` [n]."""
        return self._admissions[slots]

    def hold(self, slots: Ints, admissions: Ints) -> Flags:
        """[n], whether each of `slots` [n] holds the sequence with this admission number."""
        held: Flags = self._in_use[slots] & (self._admissions[slots] == admissions)
        return held

    def check_known(self, slots: Ints) -> None:
        """Raise StepInvalid unless all of `slots` are in use."""
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= len(self._in_use) or not self._in_use[slots].all():
            unknown = set(slots.tolist()) - set(np.flatnonzero(self._in_use).tolist())
            raise StepInvalid(f"no sequence in slots {sorted(unknown)}")

    def check(self, slots: Ints) -> None:
        """Raise StepInvalid unless all of `slots` are in use and distinct."""
        self.check_known(slots)
        # numpy's `unique` releases the interpreter lock, and taking it again costs more than all other work here.
        if len(slots) and np.bincount(slots).max() > 1:
            raise StepInvalid("a slot is named twice")
