"""A step as most steps are until a request is served, and what prompts add to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad


@dataclass(frozen=True, slots=True)
class TypicalStep:
    """A step of decodes with room for prompts."""

    cost: CostModel
    decodes: int
    context: int
    seconds: float
    """Its duration without prompts."""
    room: int
    """Prompt tokens that it can hold beside its decodes."""

    def prompt_seconds(self, num_tokens: float, start: int = 0) -> float:
        """Seconds that a prompt, computed from position `start` on, adds to the steps that it shares with decodes."""
        if num_tokens <= 0:
            return 0.0
        num_steps = math.ceil(num_tokens / self.room)
        load = StepLoad(
            prefill_tokens=max(1, round(num_tokens / num_steps)),
            prefill_pairs=round(num_tokens * (start + (num_tokens + 1) / 2) / num_steps),
            num_chunks=1,
            decodes=self.decodes,
            context=self.context,
        )
        return num_steps * ((self.cost.seconds(load) or 0.0) - self.seconds)
