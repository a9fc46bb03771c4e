"""How many tokens to guess ahead for each row: what guesses are worth against what they cost. Pure decisions.

The expected number of tokens of a row with k guesses is 1 + sum over j <= k of the product of the first j acceptance
rates; with one rate for all positions that is (1 - a^(k+1)) / (1 - a) (Leviathan et al., Fast Inference from
Transformers via Speculative Decoding, 2023, equation 1). Where guesses come from does not matter here: prompt lookup
(Saxena 2023), Medusa heads (Cai et al. 2024) and draft models differ only in how often they guess, and how well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import Acceptance

_RATE = 1 / 8
"""How far one step moves what is known of a sequence: repetition begins and ends within tens of tokens."""
_MOST_RATE = 1 / 2
"""The same after a silence, when what is known is old."""
_SILENCE = 64
"""Steps without guesses after which one observation has moved by 1 more."""
_PRIOR_RATE = 1 / 64
"""How far one step moves what is assumed of new sequences."""
_FIRST_PRIOR = 0.5
"""Assumed of the first sequences of all."""
_MARGIN = 1.05
"""What a guess, and all of a step together, have to be worth in units of their cost, as errors of the estimates are
about as large."""
_PROBE_SHARE = 0.01
"""Time that may go into guesses of which nothing is expected, to learn whether that is still so."""
_CONTROL_EVERY = 64
"""Of the steps with guesses one in so many goes without, lest it be forgotten what those cost."""
_LOSS_SHARE = 0.02
"""Time that guesses may cost in the end, whatever was expected of them."""
_MOST_BALANCE = 20.0
"""Steps that guesses may lose after they have won as much."""
_MOST_EXCESS = 4.0
"""What a step may have taken at most, in units of what was expected, because of its guesses."""
_ROUNDS = 3
"""Rounds of Dinkelbach's iteration; each converges superlinearly, and begins close."""


class LengthPolicy(Protocol):
    """Says how many guesses rows are allowed."""

    def lengths(self, rows: Sequence[tuple[Acceptance, int]], load: StepLoad) -> Sequence[int]:
        """Guesses for each of `rows` (what is known of it, KV positions it attends to), all of which decode.

        `load` is that of the step without guesses.
        """

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        """Learn from an answer."""

    def paid(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        """Learn what a step has taken, and how many right guesses it yielded."""


class Longest:
    """As many guesses as the shards can make, whatever they cost."""

    def __init__(self, most: int) -> None:
        self._most = most

    def lengths(self, rows: Sequence[tuple[Acceptance, int]], load: StepLoad) -> Sequence[int]:  # noqa: ARG002
        """The same for every row."""
        return [self._most] * len(rows)

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        """Learn nothing."""

    def paid(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        """Learn nothing."""


class Speculator:
    """Chooses the lengths that yield most tokens per second, by the cost model and what became of earlier guesses.

    The j-th guess of a row is worth the product of its first j acceptance rates, in tokens, and costs a KV position.
    The best lengths maximise tokens over seconds, which is a fractional programme: at its optimum a guess is made if
    and only if it is worth more than its cost times the best ratio, and that ratio is found by iterating (Dinkelbach,
    On Nonlinear Fractional Programming, 1967). A full batch needs more seconds for each position and has more to
    lose, so there a guess has to be likelier; a step that has nothing but guesses to make it wide pays for that once.

    Guesses that do not pay are made all the same in one step now and then, one for each row, as soon as they cost less
    than `_PROBE_SHARE` of the time since the last: what was repetition may begin again. All this rests on estimates;
    so there is a balance of what guesses have won and cost, and while that is negative there are none.
    """

    def __init__(self, cost: CostModel, *, most: int) -> None:
        """`most` is what the shards can guess for one row in one step."""
        self._cost = cost
        self._most = most
        self._prior = [_FIRST_PRIOR] * most
        self._prior_supply = 1.0
        self._credit = 0.0
        """Seconds that may go into probes."""
        self._was_wide = False
        """Whether the last step had guesses."""
        self._num_wide = 0
        """Steps with guesses."""
        self._balance = 0.0
        """Seconds that guesses have won, less those that they have cost."""

    def lengths(self, rows: Sequence[tuple[Acceptance, int]], load: StepLoad) -> Sequence[int]:
        """As `LengthPolicy`; nobody guesses while nothing is known of costs."""
        base, prices = self._cost.seconds(load), self._cost.extra_prices()
        if base is None or prices is None or not rows or self._balance < 0.0:
            return [0] * len(rows)
        for row, _ in rows:
            if not row.rates:
                row.rates, row.supply = list(self._prior), self._prior_supply
        once, each, attended = prices
        costs = [each + attended * context for _, context in rows]
        lengths = self._best(rows, costs, base, once)
        if any(lengths):
            self._num_wide += 1
            if self._num_wide % _CONTROL_EVERY == 0:
                return [0] * len(rows)
        self._probe(rows, costs, lengths, base, once)
        return lengths

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        """Learn from an answer in which the first `accepted` of `drafted` guesses were right."""
        rate = min(_MOST_RATE, _RATE + row.silent / _SILENCE)
        row.silent = 0
        if not row.rates:
            row.rates = list(self._prior)
        share = drafted / allowed
        row.supply += rate * (share - row.supply)
        self._prior_supply += _PRIOR_RATE * (share - self._prior_supply)
        num_seen = min(drafted, accepted + 1, self._most)
        for place in range(num_seen):
            right = float(place < accepted)
            row.rates[place] += rate * (right - row.rates[place])
            self._prior[place] += _PRIOR_RATE * (right - self._prior[place])
        if num_seen == accepted > 0:
            # What is behind was not tried. It follows, lest it be given up for ever after some bad luck.
            for place in range(num_seen, self._most):
                row.rates[place] += rate * (row.rates[place - 1] - row.rates[place])

    def paid(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        """Charge what a step took beyond one without guesses, and credit what right ones would have taken."""
        if not load.decodes:
            return
        plain = seconds
        if load.extra_positions or self._was_wide:
            expected, prices = self._cost.seconds(load), self._cost.extra_prices()
            if expected is None or prices is None:
                return
            plain = expected
            if load.extra_positions:
                plain -= prices[0] + load.extra_positions * prices[1]
            # What a wide step leaves to be settled falls into the next one. A step that a neighbour held up for longer
            # would have been held up all the same.
            self._balance -= min(seconds, _MOST_EXCESS * expected) - plain
        self._was_wide = load.extra_positions > 0
        self._balance += (_LOSS_SHARE + accepted / load.decodes) * plain
        self._balance = min(self._balance, _MOST_BALANCE * plain)

    def _best(
        self,
        rows: Sequence[tuple[Acceptance, int]],
        costs: Sequence[float],
        base: float,
        once: float,
    ) -> list[int]:
        nothing = [0] * len(rows)
        best, ratio = nothing, len(rows) / base
        for _ in range(_ROUNDS):
            lengths, gained, spent, supply = _worth(rows, costs, ratio)
            spent += once * min(1.0, supply)
            found = (len(rows) + gained) / (base + spent)
            if found <= ratio or gained * base <= _MARGIN * spent * len(rows):
                break
            best, ratio = lengths, found
        return best

    def _probe(
        self,
        rows: Sequence[tuple[Acceptance, int]],
        costs: Sequence[float],
        lengths: list[int],
        base: float,
        once: float,
    ) -> None:
        """Set the length of rows without guesses to 1 where the time for that has come together."""
        silent = [place for place, length in enumerate(lengths) if not length]
        if not silent:
            return
        self._credit += _PROBE_SHARE * base
        supplies = [rows[place][0].supply for place in silent]
        price = sum(costs[place] * supply for place, supply in zip(silent, supplies, strict=True))
        if len(silent) == len(rows):
            price += once * min(1.0, sum(supplies))
        if self._credit < price:
            for place in silent:
                rows[place][0].silent += 1
            return
        self._credit = 0.0
        for place in silent:
            lengths[place] = 1


def _worth(
    rows: Sequence[tuple[Acceptance, int]], costs: Sequence[float], ratio: float
) -> tuple[list[int], float, float, float]:
    """Lengths at which each guess is worth more than its cost at `ratio` tokens per second.

    And what they are expected to yield in tokens and to cost in seconds, and how many rows are going to have any.
    """
    lengths, gained, spent, supply = [], 0.0, 0.0, 0.0
    for (row, _), cost in zip(rows, costs, strict=True):
        least, value, worth, length = _MARGIN * ratio * cost, 1.0, 0.0, 0
        for rate in row.rates:
            value *= rate
            if value <= least:
                break
            worth += value
            length += 1
        lengths.append(length)
        if length:
            gained += row.supply * worth
            spent += row.supply * length * cost
            supply += row.supply
    return lengths, gained, spent, supply
