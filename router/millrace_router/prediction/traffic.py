"""Statistics of served requests, which forecast the next ones."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Protocol

_NUM_ANSWERS = 256
"""Answers that the lengths are taken from: enough for a tail, while traffic changes within minutes."""
_PROMPT_RATE = 1 / 64
"""Weight of one answer in the means over prompts."""
_YIELD_RATE = 1 / 64
"""Weight of one step in the mean number of tokens per row and step."""
_GOLDEN = (math.sqrt(5) - 1) / 2


class RunningRow(Protocol):
    """The part of a scheduler's row that a forecast reads."""

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


class AnswerLengths:
    """The survival curve of the last answers, robust against limits.

    An answer that met `max_new_tokens` is censored: it would have been longer. So the limits of some clients do not
    shorten the forecast of others, and traffic that always meets its limit is forecast to meet it (the product-limit
    estimator: Kaplan and Meier 1958). Beyond the longest answer, answers end as often per token as in the mean. Before
    the first answer all are expected to meet their limits.
    """

    def __init__(self) -> None:
        self.recent: deque[tuple[int, bool]] = deque(maxlen=_NUM_ANSWERS)
        """Length of each answer, and whether it ended by itself."""
        self._lengths: list[int] = []
        """Lengths in order, each with what the lists below have from there on."""
        self._means: list[float] = []
        """The mean length of answers that end at this length at the latest."""
        self._survivals: list[float] = []
        """The share of answers that are longer."""
        self._hazard = 0.0
        """Ends per token."""
        self._is_stale = False

    def add(self, num_generated: int, limit: int) -> None:
        """Count an answer; one without tokens is ignored.

        The `limit` of an answer that was cut, by its limit or by a client that left, is its length.
        """
        if num_generated:
            self.recent.append((num_generated, num_generated < limit))
            self._is_stale = True

    def expected(self, limit: int) -> float:
        """Return the mean number of tokens of an answer of at most `limit` tokens."""
        if self._is_stale:
            self._refresh()
        index = bisect_right(self._lengths, limit) - 1
        if index < 0:
            return float(limit)
        beyond = float(limit - self._lengths[index])
        if index == len(self._lengths) - 1 and self._hazard:
            beyond = -math.expm1(-self._hazard * beyond) / self._hazard
        return self._means[index] + self._survivals[index] * beyond

    def quantile_left(self, num_generated: int, limit: int, share: float) -> float:
        """The number of further tokens that a `share` of the answers with `num_generated` tokens do not exceed."""
        if self._is_stale:
            self._refresh()
        index = bisect_right(self._lengths, num_generated)
        alive = self._survivals[index - 1] if index else 1.0
        # The survivals fall, so their negatives are in order.
        index = bisect_left(self._survivals, (share - 1.0) * alive, index, key=float.__neg__)
        if index < len(self._lengths):
            end = float(self._lengths[index])
        elif self._hazard:
            end = max(num_generated, self._lengths[-1]) + self._tail(alive, share)
        else:
            end = math.inf
        return max(0.0, min(end, limit) - num_generated)

    def _tail(self, alive: float, share: float) -> float:
        """Further tokens beyond the longest answer, of an answer that a share `alive` of all survives."""
        left = self._survivals[-1] / alive if alive else 1.0
        return math.log(left / (1.0 - share)) / self._hazard

    def _refresh(self) -> None:
        self._is_stale = False
        answers = sorted(self.recent)
        self._lengths, self._means, self._survivals = [], [], []
        before, mean, survival = 0, 0.0, 1.0
        # Those that were cut come first among equal lengths; they have survived nonetheless.
        for at_risk, (length, ended) in zip(range(len(answers), 0, -1), answers, strict=True):
            mean += survival * (length - before)
            before = length
            if ended:
                survival *= 1.0 - 1.0 / at_risk
            self._lengths.append(length)
            self._means.append(mean)
            self._survivals.append(survival)
        num_ends = sum(ended for _, ended in answers)
        self._hazard = num_ends / sum(length for length, _ in answers)


class TrafficStatistics:
    """Lengths of answers in tokens and in steps, and of prompts."""

    def __init__(self) -> None:
        self.lengths = AnswerLengths()
        self.computed_share = 1.0
        """Mean share of a prompt that is not cached."""
        self.tokens_per_step = 1.0
        """Mean number of tokens of a row in one step; above 1 where draft tokens are accepted."""
        self.mean_prompt = 0.0
        """Mean number of prompt tokens to compute."""

    def learned(self) -> dict[str, Any]:
        """Return all that it has learned, in types of JSON, for `resumed`."""
        return {
            "answers": list(self.lengths.recent),
            "means": (self.computed_share, self.tokens_per_step, self.mean_prompt),
        }

    @classmethod
    def resumed(cls, learned: Mapping[str, Any]) -> TrafficStatistics:
        """Return statistics that continue from the result of `learned`.

        Raises:
            KeyError, TypeError, ValueError: it is no such result.

        """
        traffic = cls()
        for num_generated, has_ended in learned["answers"]:
            traffic.lengths.add(num_generated, num_generated + has_ended)
        traffic.computed_share, traffic.tokens_per_step, traffic.mean_prompt = learned["means"]
        return traffic

    def finished(
        self, *, num_prompt: int, num_generated: int, max_new_tokens: int, num_cached: int = 0
    ) -> None:
        """Learn from an answer; for one whose client left, `max_new_tokens` is `num_generated`."""
        self.lengths.add(num_generated, max_new_tokens)
        num_computed = num_prompt - num_cached
        share = num_computed / max(1, num_prompt)
        self.computed_share += _PROMPT_RATE * (share - self.computed_share)
        self.mean_prompt += _PROMPT_RATE * (num_computed - self.mean_prompt)

    def yielded(self, num_tokens: int, num_rows: int) -> None:
        """Learn from a step in which `num_rows` multi-token rows have yielded `num_tokens`."""
        self.tokens_per_step += _YIELD_RATE * (num_tokens / num_rows - self.tokens_per_step)

    def steps_left(self, rows: Sequence[RunningRow]) -> list[float]:
        """Return the number of steps until each of `rows` ends.

        The ends are quantiles of the lengths to come, which the golden ratio spreads evenly over them (a Weyl
        sequence). So the k-th of these ends estimates the k-th order statistic, unlike k times the mean.
        """
        quantile_left, at_once = self.lengths.quantile_left, self.tokens_per_step
        return [
            quantile_left(row.num_tokens_planned, row.max_tokens, (index + 0.5) * _GOLDEN % 1.0)
            / at_once
            for index, row in enumerate(rows)
        ]

    def steps_to_come(self, unknown: int) -> Iterator[float]:
        """Steps of the next requests: the steps of the last answers, repeated; `unknown` tokens before the first."""
        lengths = [length for length, _ in self.lengths.recent] or [unknown]
        return (length / self.tokens_per_step for length in cycle(lengths))

    def mean_length(self, unknown: int) -> float:
        """Return the mean number of tokens of an answer; `unknown` before the first answer."""
        recent = self.lengths.recent
        return sum([length for length, _ in recent]) / len(recent) if recent else float(unknown)

    def mean_steps(self, unknown: int) -> float:
        """Return the mean number of steps of an answer; before the first one, the steps of `unknown` tokens."""
        return self.mean_length(unknown) / self.tokens_per_step
