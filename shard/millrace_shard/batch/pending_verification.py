"""Launched steps whose tokens the host has not read, although later steps depend on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from millrace_shard.arrays import Ints
from millrace_shard.batch.step_tokens import StepTokens


class PendingVerification:
    """Steps in the order of their launches. A row with unverified draft tokens has an unknown number of tokens."""

    def __init__(self, num_slots: int) -> None:
        self._steps: deque[StepTokens] = deque()
        self._num_added = 0
        self._last_unverified = np.zeros(num_slots, dtype=np.int64)
        """The last step with draft tokens of each slot, counted from 1."""
        self._last_sampled = np.zeros(num_slots, dtype=np.int64)
        """The last step that sampled for each slot."""

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def add(self, tokens: StepTokens) -> None:
        """Add a step that was launched."""
        self._num_added += 1
        self._steps.append(tokens)
        slots = tokens.layout.yield_slots
        self._last_sampled[slots] = self._num_added
        self._last_unverified[slots[tokens.unverified]] = self._num_added

    def due(self, counted: Ints, read: Ints) -> Iterator[StepTokens]:
        """Take, in order, the steps that are done, and the steps that have to be waited for.

        These are the steps with draft tokens of `counted` slots, and all steps of the slots to `read`.
        """
        if not self._steps:
            return
        until = max(
            int(self._last_unverified[counted].max(initial=0)),
            int(self._last_sampled[read].max(initial=0)),
        )
        while self._steps and (
            self._num_added - len(self._steps) < until or self._steps[0].is_done()
        ):
            yield self._steps.popleft()
