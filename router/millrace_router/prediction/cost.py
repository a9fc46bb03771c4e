"""Seconds of a step from its load, learned while serving."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace_router.prediction.extra_costs import ExtraCosts
from millrace_router.prediction.jitter import StepJitter
from millrace_router.prediction.least_squares import solve_nonnegative
from millrace_router.prediction.step_load import StepLoad

COEFFICIENTS = (
    "step",
    "decode_row",
    "decode_context_token",
    "prefill_step",
    "prefill_token",
    "prefill_pair",
)
"""What each costs, in seconds: any step; a row that decodes; a KV position it attends to; computing prompt at all
(on CUDA such a step replays no graph); a prompt token; a KV position that one attends to."""
EXTRA_COEFFICIENTS = ("extra_step", "extra_position")
"""Further ones, where decodes fill more than one KV position: for that at all; for each position beyond the first."""

_GUESS = (1.0, 1 / 32, 1 / 32768, 0.0, 1 / 32, 1 / 32768)
"""Proportions assumed of what has not been seen. Reading the weights once costs as much as computing some tens of
tokens; attending to one position is about 1 / (6 hidden size) of a token's operations."""
_SCALE = tuple(share or 1.0 for share in _GUESS)
_RIDGE = 1e-4
"""Weight of the guess in observations: steps vary by a tenth (variance 0.01), the guess by ten times itself (100)."""
_MEMORY = 512
"""Steps of a kind that count; an older one fades by 1/e. Long enough to meet several batch sizes, seconds in time."""
_PACE_RATE = 1 / 64
"""How far one step moves the pace: a neighbour's burst of a few steps should not, a second of it should."""
_NEW_MACHINE = 2.0
"""A pace beyond this, either way, holds for what is remembered too, which would take several memories to fade."""
_LEAST_OBSERVED = 8
"""Observations before the first prediction: a prompt and some decodes."""
_FIT_EVERY = 32
"""Observations between fits, so that a fit costs each of them little."""


@dataclass(frozen=True, slots=True)
class _Wide:
    """A step with extra positions: how many, what it took, and what it would have taken without, at which pace."""

    num_positions: int
    seconds: float
    plain: float
    pace: float


class CostModel:
    """Linear in `COEFFICIENTS`, none of them negative, fitted by weighted least squares.

    Errors count relative to the step. An observation weighs 1 / (predicted * max(predicted, observed)), by which a
    step that took r times too long pulls with 1 - 1/r and never harder than one that took no time: neighbours on a
    shared machine move the fit little (a Huber-like M-estimator by reweighting: Holland and Welsch 1977). Steps with
    prompt and steps without fade separately, because the latter are many more. Directions that the observations
    leave open take the proportions of `_GUESS`: decodes of one row alone put about 1/32 of their time on the row.
    Steps whose decodes fill several positions tell of nothing but what that adds (`ExtraCosts`).

    The fit is slow by design; the *pace*, one factor on all of it, follows a machine that became slower or faster.
    """

    def __init__(self) -> None:
        self.variation = StepJitter()
        self._coefficients: list[float] = []
        self._pace = 1.0
        self._frozen = False
        self._decode_steps = _Memory(3)
        self._prefill_steps = _Memory(6)
        self._extra = ExtraCosts()
        self._wide: _Wide | None = None
        """The last step, if it had extra positions."""
        self._num_observed = 0
        self._next_fit = _LEAST_OBSERVED

    @classmethod
    def fixed(cls, coefficients: Mapping[str, float]) -> CostModel:
        """A model that knows its coefficients, by the names of `COEFFICIENTS`, and learns nothing.

        Those of `EXTRA_COEFFICIENTS` may be left out: a further position then costs what a row does.

        Raises:
            ValueError: one is missing, unknown, negative or not finite.

        """
        if set(coefficients) - set(EXTRA_COEFFICIENTS) != set(COEFFICIENTS):
            raise ValueError(f"a cost model has the coefficients {', '.join(COEFFICIENTS)}")
        if not all(0.0 <= value < math.inf for value in coefficients.values()):
            raise ValueError(f"costs are finite and not negative: {dict(coefficients)}")
        model = cls()
        model._coefficients = [float(coefficients[name]) for name in COEFFICIENTS]
        model._extra = ExtraCosts.fixed(
            once=coefficients.get("extra_step", 0.0),
            each=coefficients.get("extra_position", coefficients["decode_row"]),
        )
        model._frozen = True
        return model

    @classmethod
    def from_json(cls, coefficients: Mapping[str, float]) -> CostModel:
        """What `to_json` gave: a fixed model, or one that knows nothing yet.

        Raises:
            ValueError: as `fixed`.

        """
        return cls.fixed(coefficients) if coefficients else cls()

    def to_json(self) -> dict[str, float]:
        """The coefficients, those of further positions included; empty while nothing is known.

        They are those of the last some hundred steps: the pace of the last seconds, which may vary by a tenth and
        more, says little of the next hour.
        """
        if not self._coefficients:
            return {}
        costs = [*self._coefficients, self._extra.once, self._extra.each]
        return dict(zip(COEFFICIENTS + EXTRA_COEFFICIENTS, costs, strict=True))

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from an answered step; one without a forward pass or without a duration says nothing."""
        computes = load.decodes or load.prefill_tokens
        if self._frozen or not computes or not 0.0 < seconds < math.inf:
            return
        features = _features(load)
        plain = self._pace * sum(map(float.__mul__, self._coefficients, features))
        if (wide := self._wide) is not None:
            # What a wide step leaves to be settled falls into the next one, which so tells nothing of plain steps.
            after = 0.0 if load.extra_positions else seconds - plain
            self._extra.add(
                wide.num_positions, wide.seconds + after, plain=wide.plain, pace=wide.pace
            )
        self._wide = None
        if load.extra_positions and self._coefficients:
            self._wide = _Wide(load.extra_positions, seconds, plain, self._pace)
        if load.extra_positions or wide is not None:
            return
        self._extra.fade()
        expected = sum(map(float.__mul__, self._coefficients, features)) or seconds
        if self._coefficients:
            self.variation.took(seconds / expected)
            paced = self._pace * expected
            self._pace *= 1.0 + _PACE_RATE * (seconds - paced) / max(seconds, paced)
        memory = self._prefill_steps if load.prefill_tokens else self._decode_steps
        memory.add(features, seconds, 1.0 / (expected * max(expected, seconds)))
        self._num_observed += 1
        if self._num_observed >= self._next_fit:
            self._next_fit += min(self._next_fit, _FIT_EVERY)
            self._fit()

    def seconds(self, load: StepLoad) -> float | None:
        """How long such a step takes; None until enough was observed."""
        if not self._coefficients:
            return None
        seconds = sum(map(float.__mul__, self._coefficients, _features(load)))
        return self._pace * (seconds + self._extra.seconds(load.extra_positions))

    def extra_prices(self) -> tuple[float, float, float] | None:
        """Seconds for decodes of more than one position; None until enough was observed.

        For having any in a step; for each position beyond a row's first; for each position which that attends to.
        """
        if not self._coefficients:
            return None
        pace, extra = self._pace, self._extra
        return pace * extra.once, pace * extra.each, pace * self._coefficients[2]

    def prefill_tokens_within(
        self,
        seconds: float,
        *,
        decodes: int,
        context: int,
        start: int,
        least: int,
        most: int,
        extra_positions: int = 0,
    ) -> int:
        """Most tokens of a prompt computed up to `start` that keep a step with these decodes within `seconds`.

        Between `least` and `most`, also where `seconds` would ask for fewer; `most` while nothing is known.
        """
        if not self._coefficients:
            return most
        step, row, position, prefill_step, token, pair = self._coefficients
        rest = seconds / self._pace - step - prefill_step - row * decodes - position * context
        rest -= self._extra.seconds(extra_positions)
        if rest <= 0.0:
            return least
        # Token i of the chunk attends to start + i positions: n tokens cost quadratic * n² + linear * n.
        quadratic, linear = pair / 2, token + pair * (start + 0.5)
        root = linear + math.sqrt(linear * linear + 4 * quadratic * rest)
        if 2 * rest >= most * root:
            return most
        return max(least, math.floor(2 * rest / root))

    def _fit(self) -> None:
        """Solve the normal equations in units of `_GUESS` times the one number that suits the observations best."""
        change = 1.0 if 1 / _NEW_MACHINE < self._pace < _NEW_MACHINE else self._pace
        self._pace /= change
        for memory in (self._decode_steps, self._prefill_steps):
            memory.rescale(change)
        self._extra.rescale(change)
        gram, moment = self._prefill_steps.plus(self._decode_steps)
        size = range(len(_GUESS))
        moment = [moment[i] * _SCALE[i] for i in size]
        gram = [[gram[i][j] * _SCALE[i] * _SCALE[j] for j in size] for i in size]
        likely = [i for i in size if _GUESS[i]]
        unit = sum(moment[i] for i in likely) / sum(gram[i][j] for i in likely for j in likely)
        # Ridge towards 1 where there is a guess, towards 0 where there is none.
        matrix = [
            [unit * unit * gram[i][j] + (_RIDGE if i == j else 0.0) for j in size] for i in size
        ]
        right = [unit * moment[i] + (_RIDGE if _GUESS[i] else 0.0) for i in size]
        solution = solve_nonnegative(matrix, right)
        self._coefficients = [unit * _SCALE[i] * solution[i] for i in size]
        self._extra.assume(step=self._coefficients[0] or unit, row=self._coefficients[1])


class _Memory:
    """Normal equations of weighted observations that fade as new ones come, over the first `size` features."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._unit = 1.0
        """Weight of an observation now: growing it is fading all before, at no cost."""

    def add(self, features: Sequence[float], seconds: float, weight: float) -> None:
        """Count one observation; features past `size` have to be 0."""
        self._unit *= 1.0 + 1.0 / _MEMORY
        weight *= self._unit
        moment = self._moment
        for i, row in enumerate(self._gram):
            weighted = weight * features[i]
            moment[i] += weighted * seconds
            for j in range(i + 1):
                row[j] += weighted * features[j]

    def rescale(self, change: float) -> None:
        """Let observations have taken `change` times as long, and make the weight of the next one 1 again."""
        unit = self._unit * change
        self._gram = [[value / (unit * change) for value in row] for row in self._gram]
        self._moment = [value / unit for value in self._moment]
        self._unit = 1.0

    def plus(self, smaller: _Memory) -> tuple[list[list[float]], list[float]]:
        """The normal equations of both, the matrix complete."""
        gram, moment = [list(row) for row in self._gram], list(self._moment)
        for i in range(smaller._size):
            moment[i] += smaller._moment[i]
            for j in range(i + 1):
                gram[i][j] += smaller._gram[i][j]
        for i in range(self._size):
            for j in range(i):
                gram[j][i] = gram[i][j]
        return gram, moment


def _features(load: StepLoad) -> tuple[float, float, float, float, float, float]:
    """In the order of `COEFFICIENTS`."""
    return (
        1.0,
        float(load.decodes),
        float(load.context),
        1.0 if load.prefill_tokens else 0.0,
        float(load.prefill_tokens),
        float(load.prefill_pairs),
    )
