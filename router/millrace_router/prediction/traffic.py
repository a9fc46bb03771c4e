"""What the requests served so far teach about those to come."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle

from millrace_router.prediction.answer_lengths import AnswerLengths
from millrace_router.prediction.batch import RunningRow

_PROMPT_RATE = 1 / 64
"""How far one answer moves what is known of prompts."""
_YIELD_RATE = 1 / 64
"""How far one step moves what is known of tokens per row and step."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class TrafficStatistics:
    """Lengths of answers in tokens and in steps, and of prompts.

    A row ends at a quantile of what answers like it have left: quantiles by the golden ratio of the slot cover the
    distribution evenly (a Weyl sequence), so the k-th of these ends estimates the k-th order statistic, which k
    times the mean would not.
    """

    def __init__(self, *, max_batch_size: int) -> None:
        self.lengths = AnswerLengths()
        self.computed_share = 1.0
        """Of a prompt: what is not cached."""
        self.tokens_per_step = 1.0
        """Of a row: more where guesses are right."""
        self.mean_prompt = 0.0
        """Tokens to compute."""
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
        """Learn from a step in which `num_rows` that might yield several tokens have yielded `num_tokens`."""
        found = num_tokens / num_rows
        self.tokens_per_step += _YIELD_RATE * (found - self.tokens_per_step)

    def steps_left(self, rows: list[RunningRow]) -> list[float]:
        """Steps that each of `rows` still decodes."""
        quantile_left, hazards = self.lengths.quantile_left, self._hazards
        at_once = self.tokens_per_step
        return [
            quantile_left(row.num_tokens_planned, row.max_tokens, hazards[row.slot % len(hazards)])
            / at_once
            for row in rows
        ]

    def steps_to_come(self, unknown: int) -> Iterator[float]:
        """Steps of those who join: as the last answers took, again and again; `unknown` while there is none."""
        return (
            length / self.tokens_per_step for length in cycle(self.lengths.recent or (unknown,))
        )

    def mean_steps(self, unknown: int) -> float:
        """Steps of an answer; as if of `unknown` tokens while there is none."""
        return self.mean_length(unknown) / self.tokens_per_step

    def mean_length(self, unknown: int) -> float:
        """Tokens of an answer; `unknown` while there is none."""
        recent = self.lengths.recent
        return sum(recent) / len(recent) if recent else float(unknown)
