"""The prompt tokens that fit into a step."""

from __future__ import annotations

import math

from millrace_router.prediction.cost import CostModel


class PromptBudget:
    """Tokens, and seconds by the cost model: a token costs more the more positions it attends to."""

    def __init__(
        self, tokens: int, seconds: float = math.inf, cost: CostModel | None = None
    ) -> None:
        """Without `cost` only tokens count."""
        self.tokens = tokens
        self._seconds = seconds
        self._cost = cost

    def half(self) -> PromptBudget:
        """A budget of half as much."""
        return PromptBudget(self.tokens // 2, self._seconds / 2, self._cost)

    def fitting(self, start: int = 0) -> int:
        """Tokens of a prompt that fit from position `start` on."""
        if self._cost is None or self.tokens <= 0:
            return max(0, self.tokens)
        return self._cost.prompt_tokens_within(self._seconds, start=start, most=self.tokens)

    def spend(self, num_tokens: int, *, start: int) -> None:
        """Take away `num_tokens` of a prompt from position `start` on."""
        self.tokens -= num_tokens
        if self._cost is not None:
            self._seconds -= self._cost.prompt_seconds(num_tokens, start=start)
