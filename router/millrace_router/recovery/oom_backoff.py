"""Smaller steps after the shards ran out of memory, and larger ones again when that has gone well."""

from __future__ import annotations

from dataclasses import replace

from millrace_router.scheduler.budgets import Budgets

STEPS_BEFORE_RELIEF = 256
"""Steps that have to succeed before they may be twice as large again."""


class OomBackoff:
    """Halves batch and prompt tokens of a step with every failure; below one row and one block there is nothing."""

    def __init__(self, budgets: Budgets, *, block_size: int) -> None:
        self._full = budgets
        self._least_tokens = min(block_size, budgets.max_batch_prefill_tokens)
        self._level = 0
        self._num_succeeded = 0

    @property
    def is_off(self) -> bool:
        """Whether steps may be as large as the flags say."""
        return self._level == 0

    @property
    def budgets(self) -> Budgets:
        """What a step may hold now."""
        full = self._full
        return replace(
            full,
            max_batch_prefill_tokens=max(
                self._least_tokens, full.max_batch_prefill_tokens >> self._level
            ),
            max_batch_size=max(1, full.max_batch_size >> self._level),
        )

    def rise(self) -> bool:
        """A step ran out of memory; whether steps can become smaller."""
        before = self.budgets
        self._level += 1
        self._num_succeeded = 0
        if self.budgets == before:
            self._level -= 1
            return False
        return True

    def succeeded(self) -> bool:
        """A step has succeeded; whether they may be larger from now on."""
        if self.is_off:
            return False
        self._num_succeeded += 1
        if self._num_succeeded < STEPS_BEFORE_RELIEF:
            return False
        self._level -= 1
        self._num_succeeded = 0
        return True
