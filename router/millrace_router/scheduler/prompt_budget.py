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
        self.spent = 0.0
        """Seconds spent."""
        self.seconds = seconds
        """Seconds left."""
        self._cost = cost

    def share(self, part: float) -> PromptBudget:
        """A budget of this part."""
        return PromptBudget(int(self.tokens * part), self.seconds * part, self._cost)

    def fitting(self, start: int = 0) -> int:
        """Tokens of a prompt that fit from position `start` on."""
        if self._cost is None or self.tokens <= 0:
            return max(0, self.tokens)
        return self._cost.prompt_tokens_within(self.seconds, start=start, most=self.tokens)

    def spend(self, num_tokens: int, *, start: int) -> None:
        """Take away `num_tokens` of a prompt from position `start` on."""
        self.tokens -= num_tokens
        if self._cost is not None:
            seconds = self._cost.prompt_seconds(num_tokens, start=start)
            self.seconds -= seconds
            self.spent += seconds
