"""Statistics of served requests, which forecast the next ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle

from millrace_router.prediction.answer_lengths import AnswerLengths
from millrace_router.prediction.batch import RunningRow

_PROMPT_RATE = 1 / 64
"""Weight of one answer in the means over prompts."""
_YIELD_RATE = 1 / 64
"""Weight of one step in the mean number of tokens per row and step."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class TrafficStatistics:
    """Lengths of answers in tokens and in steps, and of prompts.

    The predicted end of a row is a quantile of the remaining lengths of such answers. The quantile follows from the
    slot by the golden ratio, which covers the distribution evenly (a Weyl sequence). So the k-th of these ends
    estimates the k-th order statistic, unlike k times the mean.
    """

    def __init__(self, *, max_batch_size: int) -> None:
        self.lengths = AnswerLengths()
        self.computed_share = 1.0
        """Mean share of a prompt that is not cached."""
        self.tokens_per_step = 1.0
        """Mean number of tokens of a row in one step; above 1 where draft tokens are accepted."""
        self.mean_prompt = 0.0
        """Mean number of prompt tokens to compute."""
        quantiles = (((slot + 0.5) * _GOLDEN) % 1.0 for slot in range(max_batch_size))
        self._hazards = [-math.log1p(-quantile) for quantile in quantiles]

    def finished(
        self, *, num_prompt: int, num_generated: int, max_new_tokens: int, num_cached: int
    ) -> None:
        """Learn from an answer."""
        self.lengths.add(num_generated, max_new_tokens)
        num_computed = num_prompt - num_cached
        share = num_computed / max(1, num_prompt)
        self.computed_share += _PROMPT_RATE * (share - self.computed_share)
        self.mean_prompt += _PROMPT_RATE * (num_computed - self.mean_prompt)

    def yielded(self, num_tokens: int, num_rows: int) -> None:
        """Learn from a step in which `num_rows` multi-token rows have yielded `num_tokens`."""
        found = num_tokens / num_rows
        self.tokens_per_step += _YIELD_RATE * (found - self.tokens_per_step)

    def steps_left(self, rows: list[RunningRow]) -> list[float]:
        """The number of steps that each of `rows` is expected to decode."""
        quantile_left, hazards = self.lengths.quantile_left, self._hazards
        at_once = self.tokens_per_step
        return [
            quantile_left(row.num_tokens_planned, row.max_tokens, hazards[row.slot % len(hazards)])
            / at_once
            for row in rows
        ]

    def steps_to_come(self, unknown: int) -> Iterator[float]:
        """Steps of the next requests: those of the last answers, repeated; `unknown` tokens before the first."""
        return (
            length / self.tokens_per_step for length in cycle(self.lengths.recent or (unknown,))
        )

    def mean_steps(self, unknown: int) -> float:
        """Mean number of steps of an answer; that of `unknown` tokens before the first answer."""
        return self.mean_length(unknown) / self.tokens_per_step

    def mean_length(self, unknown: int) -> float:
        """Mean number of tokens of an answer; `unknown` before the first answer."""
        recent = self.lengths.recent
        return sum(recent) / len(recent) if recent else float(unknown)
