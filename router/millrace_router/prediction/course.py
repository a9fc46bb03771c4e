"""What a forecast starts from, and what it finds of a request that joins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from millrace_router.prediction.late_planning import LatePlanning


@dataclass(frozen=True, slots=True)
class StepPipeline:
    """When steps are planned, of which so many are in flight at most."""

    depth: int
    """A row ends, and its place is free, this many steps after the plan that saw it end."""
    late: LatePlanning

    def open_part(self, seconds: float) -> float:
        """From the start of a step that takes so many seconds until the next one is planned."""
        return seconds if self.depth == 1 else self.late.open_part(seconds)


class RunningRow(Protocol):
    """What a forecast needs to know of a row."""

    @property
    def slot(self) -> int:
        """Its place in the batch."""

    @property
    def num_prompt_left(self) -> int:
        """Input tokens that no step computes yet."""

    @property
    def num_tokens_planned(self) -> int:
        """New tokens that the steps planned so far yield."""

    @property
    def max_tokens(self) -> int:
        """New tokens it may yield."""

    @property
    def num_kv_tokens(self) -> int:
        """KV positions filled once everything planned has run."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs now."""

    rows: list[RunningRow]
    num_rows: int
    num_kv_tokens: int
    """Held, and promised where everything is."""
    num_prompt_left: int

    def context(self, size: int, num_kv_tokens: float) -> int:
        """KV positions of `size` rows, of which those beyond what runs now hold `num_kv_tokens` each."""
        return self.num_kv_tokens + round(max(0, size - self.num_rows) * num_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A request that joins the queue."""

    num_ahead: int
    """Entries that are served before it."""
    prompt_ahead: float
    """Tokens to compute of each of those."""
    num_prompt_tokens: int
    num_cached: int
    max_new_tokens: int
    num_kv_tokens: float
    """It holds halfway through its answer."""
    num_places: int
    """That are free for those ahead and for it."""
    now_in_step: float
    """Seconds that the oldest step in flight has run."""

    @property
    def num_left(self) -> int:
        """Prompt tokens to compute."""
        return max(1, self.num_prompt_tokens - self.num_cached)


@dataclass(frozen=True, slots=True)
class Course:
    """Seconds from now, and of a step."""

    queue_seconds: float
    """Until the plan that admits it."""
    first_token_seconds: float
    step_seconds: float
    """Between tokens after the first, a share of the prompts of others included."""
