"""The inputs of a forecast: the running batch, and the request that joins it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class RunningRow(Protocol):
    """The part of a scheduler's row that a forecast reads."""

    @property
    def slot(self) -> int:
        """Its place in the batch."""

    @property
    def num_prompt_left(self) -> int:
        """Input tokens that no planned step computes."""

    @property
    def num_tokens_planned(self) -> int:
        """New tokens that the planned steps yield."""

    @property
    def max_tokens(self) -> int:
        """Most new tokens that the row may yield."""

    @property
    def num_kv_tokens(self) -> int:
        """KV positions that are filled after all planned steps."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The running rows and their sums."""

    rows: list[RunningRow]
    num_rows: int
    num_kv_tokens: int
    """KV positions held, and also those reserved where each row reserves all that it may need."""
    num_prompt_left: int
    """Prompt tokens that no planned step computes, in all …"""
    longest_prompt_left: int
    """… and of the row that lacks most …"""
    longest_prompt_start: int
    """… from this position on."""

    def context(self, size: int, num_kv_tokens: float) -> int:
        """KV positions of a batch of `size` rows, whose additional rows hold `num_kv_tokens` each."""
        return self.num_kv_tokens + round(max(0, size - self.num_rows) * num_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A request that joins the queue."""

    num_ahead: int
    """Requests that are served before it."""
    prompt_ahead: float
    """Mean number of tokens to compute of each of those."""
    num_prompt_tokens: int
    num_cached: int
    max_new_tokens: int
    num_kv_tokens: float
    """KV positions that it holds halfway through its answer."""
    num_places: int
    """Free places in the batch for the requests ahead and for it."""
    now_in_step: float
    """Seconds since the oldest step in flight began."""
    steps: tuple[float, ...] = ()
    """Predicted seconds of the steps in flight, the oldest first; empty if they are not known."""

    @property
    def num_left(self) -> int:
        """Prompt tokens to compute."""
        return max(1, self.num_prompt_tokens - self.num_cached)

    def overtakes(self, batch: Batch, longest_overtaking: Callable[[int], int]) -> bool:
        """Whether its prompt is so short that it comes before one in progress, and it has a place in the batch."""
        longest = longest_overtaking(batch.longest_prompt_left)
        return self.num_left <= longest and self.num_ahead < self.num_places
