"""How many draft tokens each row gets: their expected worth against their cost. Pure decisions.

The expected number of tokens of a row with k draft tokens is 1 + sum over j <= k of the product of the first j
acceptance rates; with one rate for all positions that is (1 - a^(k+1)) / (1 - a) (Leviathan et al., Fast Inference from
Transformers via Speculative Decoding, 2023, equation 1). The source of draft tokens does not matter here: prompt lookup
(Saxena 2023), Medusa heads (Cai et al. 2024) and draft models differ only in how often they make draft tokens, and in
how many of them are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from millrace_router.prediction.cost import CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_router.request.schedulable import Acceptance

_RATE = 1 / 8
"""Weight of one step in the rates of a sequence: repetition begins and ends within tens of tokens."""
_MAX_RATE = 1 / 2
"""The same after a silence, when the known rates are old."""
_SILENCE = 64
"""Steps without draft tokens that add 1 to the weight of the next observation."""
_PRIOR_RATE = 1 / 64
"""Weight of one step in the rates that are assumed for new sequences."""
_FIRST_PRIOR = 0.5
"""The rate that is assumed for the very first sequences."""
_MARGIN = 1.05
"""Least worth of a draft token, and of all in a step together, as a multiple of the cost; estimates are off by about
as much."""
_PROBE_SHARE = 0.01
"""Share of the time for draft tokens that are expected to be rejected; they update the rates."""
_CONTROL_EVERY = 64
"""One in this many steps with draft tokens goes without, to update the cost of such steps."""
_LOSS_SHARE = 0.02
"""Share of the time that draft tokens may cost in the end, whatever was expected of them."""
_MAX_BALANCE = 20.0
"""Durations of a step that draft tokens may lose after they have won as much."""
_MAX_EXCESS = 4.0
"""Most of a step's duration that is charged, as a multiple of the expected duration."""
_ROUNDS = 3
"""Rounds of Dinkelbach's iteration; each converges superlinearly, and begins close."""

DraftRow = tuple[Acceptance, int]
"""The acceptance of a row's earlier draft tokens, and the KV positions that it attends to."""


class DraftPolicy(Protocol):
    """Chooses the number of draft tokens of each row."""

    def lengths(self, rows: Sequence[DraftRow], load: StepLoad) -> Sequence[int]:
        """Draft tokens for each of `rows`, all of which decode; `load` is the step's load without draft tokens."""

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        """Learn from an answer."""

    def step_took(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        """Learn the duration of a step, and how many of its draft tokens were accepted."""


class FixedDraftLength:
    """Always as many draft tokens as the shards can make, at any cost."""

    def __init__(self, length: int) -> None:
        self._length = length

    def lengths(self, rows: Sequence[DraftRow], load: StepLoad) -> Sequence[int]:  # noqa: ARG002
        """Return the same length for every row."""
        return [self._length] * len(rows)

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        """Learn nothing."""

    def step_took(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        """Learn nothing."""


class AdaptiveDraftLength:
    """Chooses the lengths with most tokens per second, by the cost model and the acceptance of earlier draft tokens.

    The j-th draft token of a row is worth the product of its first j acceptance rates, in tokens, and costs one KV
    position. The best lengths maximise tokens over seconds, which is a fractional programme: at its optimum a draft
    token is made if and only if it is worth more than its cost times the best ratio, and iteration finds that ratio
    (Dinkelbach, On Nonlinear Fractional Programming, 1967). In a full batch a position costs more and a delay affects
    more rows, so draft tokens need higher rates; the cost of having any draft tokens in a step counts once.

    Draft tokens that do not pay are made nevertheless in a step now and then, one for each row, as soon as they cost
    less than `_PROBE_SHARE` of the time since the last such step: a text may begin to repeat itself. All this rests on
    estimates. So there is a balance of the time that draft tokens have won and cost, and while it is negative there
    are none.
    """

    def __init__(self, cost: CostModel, *, max_draft_tokens: int) -> None:
        """The shards can make `max_draft_tokens` for one row in one step."""
        self._cost = cost
        self._max_draft_tokens = max_draft_tokens
        self._prior = [_FIRST_PRIOR] * max_draft_tokens
        self._prior_supply = 1.0
        self._probe_seconds = 0.0
        """Seconds that may go into probes."""
        self._last_had_drafts = False
        """Whether the last step had draft tokens."""
        self._num_with_drafts = 0
        """Steps with draft tokens."""
        self._balance = 0.0
        """Seconds that draft tokens have won, less those that they have cost."""

    def lengths(self, rows: Sequence[DraftRow], load: StepLoad) -> Sequence[int]:
        """As `DraftPolicy`; no draft tokens until the costs are known."""
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
            self._num_with_drafts += 1
            if self._num_with_drafts % _CONTROL_EVERY == 0:
                return [0] * len(rows)
        self._probe(rows, costs, lengths, base, once)
        return lengths

    def observe(self, row: Acceptance, *, allowed: int, drafted: int, accepted: int) -> None:
        """Learn from an answer in which the first `accepted` of `drafted` draft tokens were accepted."""
        rate = min(_MAX_RATE, _RATE + row.silent / _SILENCE)
        row.silent = 0
        if not row.rates:
            row.rates = list(self._prior)
        share = drafted / allowed
        row.supply += rate * (share - row.supply)
        self._prior_supply += _PRIOR_RATE * (share - self._prior_supply)
        num_seen = min(drafted, accepted + 1, self._max_draft_tokens)
        for position in range(num_seen):
            right = float(position < accepted)
            row.rates[position] += rate * (right - row.rates[position])
            self._prior[position] += _PRIOR_RATE * (right - self._prior[position])
        if num_seen == accepted > 0:
            # Later positions were not tried. Their rates follow, so that some bad luck does not exclude them for ever.
            for position in range(num_seen, self._max_draft_tokens):
                row.rates[position] += rate * (row.rates[position - 1] - row.rates[position])

    def step_took(self, load: StepLoad, seconds: float, *, accepted: int) -> None:
        """Charge the extra time over a step without draft tokens; credit the steps that accepted ones save."""
        if not load.decodes:
            return
        plain = seconds
        if load.extra_positions or self._last_had_drafts:
            expected, prices = self._cost.seconds(load), self._cost.extra_prices()
            if expected is None or prices is None:
                return
            plain = expected
            if load.extra_positions:
                plain -= prices[0] + load.extra_positions * prices[1]
            # Verification of a step with draft tokens runs in the next step. A step that other processes delayed for
            # longer would have been delayed without draft tokens too.
            self._balance -= min(seconds, _MAX_EXCESS * expected) - plain
        self._last_had_drafts = load.extra_positions > 0
        self._balance += (_LOSS_SHARE + accepted / load.decodes) * plain
        self._balance = min(self._balance, _MAX_BALANCE * plain)

    def _best(
        self, rows: Sequence[DraftRow], costs: Sequence[float], base: float, once: float
    ) -> list[int]:
        nothing = [0] * len(rows)
        best, ratio = nothing, len(rows) / base
        for _ in range(_ROUNDS):
            lengths, gained, spent, supply = _worth(rows, costs, ratio)
            spent += once * min(1.0, supply)
            value = (len(rows) + gained) / (base + spent)
            if value <= ratio or gained * base <= _MARGIN * spent * len(rows):
                break
            best, ratio = lengths, value
        return best

    def _probe(
        self,
        rows: Sequence[DraftRow],
        costs: Sequence[float],
        lengths: list[int],
        base: float,
        once: float,
    ) -> None:
        """Set the length of rows without draft tokens to 1, if enough time for a probe has accumulated."""
        silent = [index for index, length in enumerate(lengths) if not length]
        if not silent:
            return
        self._probe_seconds += _PROBE_SHARE * base
        supplies = [rows[index][0].supply for index in silent]
        price = sum(costs[index] * supply for index, supply in zip(silent, supplies, strict=True))
        if len(silent) == len(rows):
            price += once * min(1.0, sum(supplies))
        if self._probe_seconds < price:
            for index in silent:
                rows[index][0].silent += 1
            return
        self._probe_seconds = 0.0
        for index in silent:
            lengths[index] = 1


def _worth(
    rows: Sequence[DraftRow], costs: Sequence[float], ratio: float
) -> tuple[list[int], float, float, float]:
    """Lengths at which each draft token is worth more than its cost at `ratio` tokens per second.

    Returns also the expected number of accepted tokens, their cost in seconds, and the expected number of rows with
    draft tokens.
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
