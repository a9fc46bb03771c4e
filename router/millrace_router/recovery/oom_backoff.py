"""Smaller steps after the shards ran out of memory, and larger ones after enough steps succeeded."""

from __future__ import annotations

from dataclasses import replace

from millrace_router.scheduler.step_plan import Budgets

STEPS_BEFORE_RELIEF = 256
"""Successful steps before the limits double again."""


class OomBackoff:
    """Halves the batch and the prompt tokens of a step after every failure, down to one row and one block."""

    def __init__(self, budgets: Budgets, *, block_size: int) -> None:
        self._full = budgets
        self._least_tokens = min(block_size, budgets.max_batch_prefill_tokens)
        self._level = 0
        self._num_succeeded = 0

    @property
    def is_off(self) -> bool:
        """Whether steps may be as large as the flags allow."""
        return self._level == 0

    @property
    def budgets(self) -> Budgets:
        """The current limits of a step."""
        full = self._full
        return replace(
            full,
            max_batch_prefill_tokens=max(
                self._least_tokens, full.max_batch_prefill_tokens >> self._level
            ),
            max_batch_size=max(1, full.max_batch_size >> self._level),
        )

    def shrink(self) -> bool:
        """Record that a step ran out of memory; whether the limits could be reduced."""
        before = self.budgets
        self._level += 1
        self._num_succeeded = 0
        if self.budgets == before:
            self._level -= 1
            return False
        return True

    def succeeded(self) -> bool:
        """Record a successful step; whether the limits grew."""
        if self.is_off:
            return False
        self._num_succeeded += 1
        if self._num_succeeded < STEPS_BEFORE_RELIEF:
            return False
        self._level -= 1
        self._num_succeeded = 0
        return True
