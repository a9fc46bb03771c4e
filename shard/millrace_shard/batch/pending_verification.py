"""Steps whose tokens the host has not looked at yet, though something on the host depends on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from millrace_shard.arrays import Ints
from millrace_shard.batch.step_tokens import StepTokens


class PendingVerification:
    """In the order of their launches. How many tokens a row has whose guesses are not settled, nobody knows."""

    def __init__(self, num_slots: int) -> None:
        self._steps: deque[StepTokens] = deque()
        self._num_added = 0
        self._last_awaited = np.zeros(num_slots, dtype=np.int64)
        """The last step with guesses of each slot, counted from 1."""
        self._last_sampled = np.zeros(num_slots, dtype=np.int64)
        """The last step that sampled for each slot."""

    def clear(self) -> None:
        """Forget all."""
        self._steps.clear()

    def add(self, tokens: StepTokens) -> None:
        """A step was launched."""
        self._num_added += 1
        self._steps.append(tokens)
        slots = tokens.prepared.yield_slots
        self._last_sampled[slots] = self._num_added
        self._last_awaited[slots[tokens.awaited]] = self._num_added

    def due(self, counted: Ints, read: Ints) -> Iterator[StepTokens]:
        """Take the steps that are done, and those to wait for, in order.

        Waited for are the guesses of `counted` slots, and all tokens of the slots to `read`.
        """
        if not self._steps:
            return
        until = max(
            int(self._last_awaited[counted].max(initial=0)),
            int(self._last_sampled[read].max(initial=0)),
        )
        while self._steps and (
            self._num_added - len(self._steps) < until or self._steps[0].is_done()
        ):
            yield self._steps.popleft()
