"""The distribution of answer lengths, learned from finished answers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

_MEMORY = 256
"""Answers after which one has faded by 1/e: enough for a tail, while traffic changes within minutes."""
_BOUNDS: tuple[int, ...] = (
    *range(0, 16, 4),
    *((4 + part) << octave for octave in range(2, 20) for part in range(4)),
)
"""Bounds of the pieces, each a quarter of its power of two wide; the last bound is above any context."""
_WIDTHS: tuple[int, ...] = tuple(end - begin for begin, end in pairwise(_BOUNDS))


class AnswerLengths:
    """A survival curve of answers with a constant hazard per piece, robust against limits.

    An answer that met `max_new_tokens` is censored: it would have been longer. So the limits of some clients do not
    shorten the forecast of others, and traffic that always meets its limit is forecast to meet it. The hazard of a
    piece is the number of ends per token generated in it (the piecewise exponential model: Friedman 1982); the hazard
    of the previous piece is a prior with the weight of one answer. Beyond the longest answer the hazard stays
    constant. Before the first end of an answer, all answers are expected to meet their limits.
    """

    def __init__(self) -> None:
        self._ends = [0.0] * len(_WIDTHS)
        self._tokens = [0.0] * len(_WIDTHS)
        self._recent: deque[int] = deque(maxlen=_MEMORY)
        self._hazards = [0.0] * len(_WIDTHS)
        self._hazard_before = [0.0] * len(_BOUNDS)
        self._left_at: list[float] = [float(_BOUNDS[-1] - bound) for bound in _BOUNDS]
        self._is_stale = False

    @property
    def recent(self) -> Sequence[int]:
        """Lengths of the last answers, censored ones included."""
        return self._recent

    def add(self, num_generated: int, limit: int) -> None:
        """Count an answer; one without tokens is ignored.

        The `limit` of an answer that was cut, by its limit or by a client that left, is its length.
        """
        if num_generated < 1:
            return
        fade = 1.0 - 1.0 / _MEMORY
        self._ends = [value * fade for value in self._ends]
        self._tokens = [value * fade for value in self._tokens]
        for piece, begin in enumerate(_BOUNDS[:-1]):
            if begin >= num_generated:
                break
            self._tokens[piece] += min(num_generated - begin, _WIDTHS[piece])
        if num_generated < limit:
            self._ends[_piece(num_generated - 1)] += 1.0
        self._recent.append(num_generated)
        self._is_stale = True

    def expected_left(self, num_generated: int, limit: int) -> float:
        """Mean number of further tokens of an answer with `num_generated` tokens."""
        self._refresh()
        if num_generated >= limit:
            return 0.0
        survival = math.exp(self._hazard(num_generated) - self._hazard(limit))
        return self._left(num_generated) - survival * self._left(limit)

    def quantile_left(self, num_generated: int, limit: int, hazard: float) -> float:
        """The number of further tokens that an answer exceeds with probability exp(-`hazard`)."""
        if self._is_stale:
            self._refresh()
        # Runs for each row of each prediction, so it makes few calls.
        piece = bisect_right(_BOUNDS, num_generated) - 1
        hazard += self._hazard_before[piece]
        hazard += (num_generated - _BOUNDS[piece]) * self._hazards[piece]
        piece = bisect_right(self._hazard_before, hazard) - 1
        if piece == len(_WIDTHS):
            return float(limit - num_generated)
        end = _BOUNDS[piece] + (hazard - self._hazard_before[piece]) / self._hazards[piece]
        left = end - num_generated
        return max(0.0, left) if end < limit else float(limit - num_generated)

    def _hazard(self, num_tokens: int) -> float:
        """The hazard from 0 to `num_tokens`, cumulated."""
        piece = _piece(num_tokens)
        return self._hazard_before[piece] + (num_tokens - _BOUNDS[piece]) * self._hazards[piece]

    def _left(self, num_tokens: int) -> float:
        """Mean number of further tokens without a limit other than the last bound."""
        piece = _piece(num_tokens)
        width = _BOUNDS[piece + 1] - num_tokens
        return _mean_within(self._hazards[piece], width, self._left_at[piece + 1])

    def _refresh(self) -> None:
        """Compute the curve from the counts, if they have changed."""
        if not self._is_stale:
            return
        self._is_stale = False
        hazard = 0.0
        for piece, width in enumerate(_WIDTHS):
            hazard = (self._ends[piece] + hazard * width) / (self._tokens[piece] + width)
            self._hazards[piece] = hazard
            self._hazard_before[piece + 1] = self._hazard_before[piece] + hazard * width
        left = 0.0
        for piece in reversed(range(len(_WIDTHS))):
            self._left_at[piece + 1] = left
            left = _mean_within(self._hazards[piece], _WIDTHS[piece], left)
        self._left_at[0] = left


def _piece(num_tokens: int) -> int:
    return bisect_right(_BOUNDS, num_tokens) - 1


def _mean_within(hazard: float, width: int, left_after: float) -> float:
    """Mean number of further tokens up to a bound `width` tokens away, beyond which the mean is `left_after`."""
    survival = math.exp(-hazard * width)
    within = -math.expm1(-hazard * width) / hazard if hazard > 0.0 else width
    return within + survival * left_after
