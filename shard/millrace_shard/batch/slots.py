"""Which slots hold a sequence, and whether it can run."""

from __future__ import annotations

import numpy as np

from millrace_shard.arrays import Flags, Ints
from millrace_shard.errors import StepInvalid


class Slots:
    """A sequence that is invalid by itself holds its slot too, until it is dropped."""

    def __init__(self, size: int) -> None:
        self._in_use = np.zeros(size, dtype=np.bool_)
        self._is_invalid = np.zeros(size, dtype=np.bool_)
        self._admissions = np.zeros(size, dtype=np.int64)
        """How many sequences each slot has held, so that an old one's news is not taken for the present one's."""

    @property
    def num_in_use(self) -> int:
        """How many hold a sequence."""
        return int(self._in_use.sum())

    def clear(self) -> None:
        """Free all."""
        self._in_use[:] = False

    def take(self, slot: int, *, is_valid: bool) -> None:
        """Put a sequence into `slot`, which has to be free. Raises StepInvalid."""
        size = len(self._in_use)
        if not 0 <= slot < size:
            raise StepInvalid(f"slot {slot} is not one of {size}")
        if self._in_use[slot]:
            raise StepInvalid(f"slot {slot} is in use")
        self._in_use[slot] = True
        self._is_invalid[slot] = not is_valid
        self._admissions[slot] += 1

    def free(self, slots: Ints) -> None:
        """Forget who is in `slots`."""
        self._in_use[slots] = False

    def is_valid(self, slot: int) -> bool:
        """Whether there is a sequence in `slot`, and it can run."""
        return bool(self._in_use[slot] and not self._is_invalid[slot])

    def invalid(self, slots: Ints) -> Flags:
        """Which of `slots` [n], all in use, hold a sequence that cannot run."""
        flags: Flags = self._is_invalid[slots]
        return flags

    def admissions(self, slots: Ints) -> Ints:
        """[n], which admission to its slot the sequence in each of `slots` [n] is."""
        return self._admissions[slots]

    def hold(self, slots: Ints, admissions: Ints) -> Flags:
        """Whether each of `slots` [n] still holds the sequence of that admission."""
        there: Flags = self._in_use[slots] & (self._admissions[slots] == admissions)
        return there

    def check_known(self, slots: Ints) -> None:
        """Raise StepInvalid unless all of `slots` are in use."""
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= len(self._in_use) or not self._in_use[slots].all():
            unknown = set(slots.tolist()) - set(np.flatnonzero(self._in_use).tolist())
            raise StepInvalid(f"no sequence in slots {sorted(unknown)}")

    def check(self, slots: Ints) -> None:
        """Raise StepInvalid unless all of `slots` are in use, and each is named once."""
        self.check_known(slots)
        # numpy's `unique` lets go of the interpreter, and getting it back takes longer than all else here.
        if len(slots) and np.bincount(slots).max() > 1:
            raise StepInvalid("a slot is named twice")
