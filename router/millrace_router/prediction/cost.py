"""The duration of a step as a function of its load, learned while serving."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from millrace_router.prediction.least_squares import NormalEquations, solve_nonnegative
from millrace_router.prediction.step_load import StepLoad

_RESIDUAL_RIDGE = 1e-3
"""Share by which the costs are drawn to the assumed ones, where both counts always come together."""


class ResidualCosts:
    """Seconds for two counts of a step, neither negative, fitted to the time beyond the expected duration without them.

    A fading ridge regression in relative errors as in `CostModel`, only of steps with such counts. So they do not
    change the costs of other steps, a delayed step counts little, and a few steps correct a wrong assumption.
    """

    def __init__(self, costs: Sequence[float] = (0.0, 0.0), *, memory: int) -> None:
        """`memory` is the number of steps after which an observation has faded by 1/e."""
        self.costs = list(costs)
        self._memory = memory
        self._assumed = self.costs
        self._trust = (0.0, 0.0)
        """Weights of the assumed costs."""
        self._gram = [[0.0, 0.0], [0.0, 0.0]]
        self._moment = [0.0, 0.0]

    def seconds(self, counts: Sequence[float]) -> float:
        """Return the cost of a step with these counts."""
        return self.costs[0] * counts[0] + self.costs[1] * counts[1]

    def assume(self, costs: Sequence[float], trust: tuple[float, float]) -> None:
        """Set the costs that are assumed without observations, and their weights."""
        self._assumed, self._trust = list(costs), trust
        self._fit()

    def add(self, counts: Sequence[float], seconds: float, *, plain: float, pace: float) -> None:
        """Learn from a step with these counts; without them `plain` seconds were expected."""
        expected = plain + pace * self.seconds(counts)
        weight = pace * pace / (expected * max(expected, seconds))
        self._fade(1.0 - 1.0 / self._memory)
        for i in range(2):
            self._moment[i] += weight * counts[i] * (seconds - plain) / pace
            for j in range(2):
                self._gram[i][j] += weight * counts[i] * counts[j]
        self._fit()

    def learned(self) -> list[Any]:
        """Return all that it has learned, in types of JSON, for `resume`."""
        return [self.costs, self._gram, self._moment, self._assumed, self._trust]

    def resume(self, learned: list[Any]) -> None:
        """Continue from the result of `learned`."""
        self.costs, self._gram, self._moment, self._assumed, self._trust = learned

    def idle(self, memory: int) -> None:
        """Count a step without such counts, by `memory` of which the observations fade, so that no bad one lasts."""
        if self._gram[0][0]:
            self._fade(1.0 - 1.0 / memory)
            self._fit()

    def rescale(self, change: float) -> None:
        """Multiply the observed durations by `change`."""
        self.costs = [cost * change for cost in self.costs]
        self._gram = [[value / change**2 for value in row] for row in self._gram]
        self._moment = [value / change for value in self._moment]

    def _fade(self, factor: float) -> None:
        self._gram = [[factor * value for value in row] for row in self._gram]
        self._moment = [factor * value for value in self._moment]

    def _fit(self) -> None:
        matrix, right = [list(row) for row in self._gram], list(self._moment)
        for i in range(2):
            pull = self._trust[i] + _RESIDUAL_RIDGE * self._gram[i][i]
            matrix[i][i] += pull
            right[i] += pull * self._assumed[i]
        if matrix[0][0] and matrix[1][1]:
            self.costs = solve_nonnegative(matrix, right)


COEFFICIENTS = (
    "step",
    "decode_row",
    "decode_context_token",
    "prefill_step",
    "prefill_token",
    "prefill_pair",
)
"""Seconds for: any step; each row that decodes; each KV position that such a row attends to; any step with prompts (on
CUDA such a step replays no graph); each prompt token; each KV position that a prompt token attends to."""
EXTRA_COEFFICIENTS = ("extra_step", "extra_position")
"""Seconds for: any step with decodes of several KV positions; each such position beyond a row's first."""
ADAPTER_COEFFICIENTS = ("adapter_byte", "adapter_slice")
"""Seconds for: each byte of the adapters in a step; each slice of 16 ranks that a position is multiplied with."""
TILE_COEFFICIENT = "tile"
"""Seconds for each tile of an image, or 256 features of one of any size. A step that encodes does nothing else."""
_TILE_RATE = 1 / 16
"""Weight of one tile in the mean, once there were as many."""
_ADAPTER_UNITS = (1e6, 1e3)
_EXTRA_TRUST = 4.0
"""Weight of the assumed costs of extra positions, in steps of `_TYPICAL_EXTRA` of them."""
_TYPICAL_EXTRA = 4.0
_EXTRA_MEMORY = 128
_IDLE_MEMORY = 2048
_ADAPTER_MEMORY = 256
NUM_RATIOS = 256
"""Steps whose ratios of observed to expected duration are kept."""
_NUM_ENTRIES = 65
"""Requests whose time until they are queued is kept."""
_ANSWER_RATE = 1 / 64
"""Weight of one answer in the mean of the router's own time."""

_PRIOR = (1.0, 1 / 32, 1 / 32768, 0.0, 1 / 32, 1 / 32768)
"""Proportions that are assumed without observations. Reading the weights once costs as much as computing some tens of
tokens; attending to one position is about 1 / (6 hidden size) of a token's operations."""
_SCALE = tuple(share or 1.0 for share in _PRIOR)
_RIDGE = 1e-4
"""Weight of the prior, in observations: steps vary by a tenth (variance 0.01), the prior by ten times itself (100)."""
_PACE_RATE = 1 / 64
"""Weight of one step in the pace: a delay of a few steps should not move it, a delay of a second should."""
_NEW_MACHINE = 2.0
"""A change of pace beyond this factor rescales the observations too, because they would fade too slowly."""
_LEAST_OBSERVED = 8
"""Observations before the first prediction: a prompt and some decodes."""
FIRST_PROMPT_TOKENS = 256
"""Most prompt tokens of a step before the first prediction, so that it is short on any machine."""
_FIT_EVERY = 32
"""Observations between fits, which bounds the cost of fitting per step."""


class StepJitter:
    """The ratios of the last `NUM_RATIOS` steps to the durations that the cost model expected."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self.add = self._ratios.append

    def learned(self) -> list[float]:
        """Return the ratios, for another one to add."""
        return list(self._ratios)

    def ratios(self) -> list[float]:
        """Return the ratios in their order, scaled to a mean of 1; empty before there are `NUM_RATIOS`.

        The order matters: a delay on a shared machine lasts for several steps.
        """
        if len(self._ratios) < NUM_RATIOS:
            return []
        mean = sum(self._ratios) / NUM_RATIOS
        return [ratio / mean for ratio in self._ratios]


class RouterOverhead:
    """Seconds that the router adds to a request and to a step."""

    def __init__(self) -> None:
        self.turn_seconds = 0.0
        """From an answer until its tokens are delivered and the step after the next one is planned: the mean."""
        self._entries: deque[float] = deque(maxlen=_NUM_ENTRIES)
        self.add_entry = self._entries.append
        """Counts a request by the seconds from its arrival until it was queued."""

    @property
    def entry_seconds(self) -> float:
        """From the arrival of a request until it is queued: the median of the last ones; 0 before the first."""
        return median(self._entries) if self._entries else 0.0

    def add_answer(self, seconds: float) -> None:
        """Count an answer that took the router `seconds`."""
        self.turn_seconds += _ANSWER_RATE * (seconds - self.turn_seconds)


@dataclass(frozen=True, slots=True)
class _StepWithExtra:
    """A step with extra positions."""

    extra: tuple[float, float]
    seconds: float
    """Its duration."""
    plain: float
    """The expected duration without extra positions."""
    pace: float


class CostModel:
    """Linear in `COEFFICIENTS`, none of them negative, fitted by weighted least squares.

    Errors are relative to the duration of the step. The weight of an observation is
    1 / (predicted * max(predicted, observed)): a step that took r times too long pulls with 1 - 1/r, and never harder
    than one that took no time. So other processes on the machine move the fit little (a Huber-like M-estimator by
    reweighting: Holland and Welsch 1977). Steps with and without prompts fade separately, because the latter are many
    more. Directions that the observations leave open take the proportions of `_PRIOR`: decodes of a single row put
    about 1/32 of their time on the row. Steps whose decodes fill several positions teach only the cost of those.

    The fit is slow by design. The *pace*, one factor on all coefficients, follows a machine that became slower or
    faster.
    """

    def __init__(self) -> None:
        self.jitter = StepJitter()
        self.overhead = RouterOverhead()
        self._coefficients: list[float] = []
        self._pace = 1.0
        self._frozen = False
        self._decode_steps = NormalEquations(3)
        self._prefill_steps = NormalEquations(6)
        self._extra = ResidualCosts(memory=_EXTRA_MEMORY)
        self._adapters = ResidualCosts(memory=_ADAPTER_MEMORY)
        self._last_with_extra: _StepWithExtra | None = None
        """The last step, if it had extra positions."""
        self._num_observed = 0
        self._next_fit = _LEAST_OBSERVED
        self._tile = 0.0
        """Seconds for a tile; 0 before the first."""
        self._num_tiles = 0

    @classmethod
    def fixed(cls, coefficients: Mapping[str, float]) -> CostModel:
        """Return a model with given coefficients, by the names of `COEFFICIENTS`, that learns nothing.

        Those of `EXTRA_COEFFICIENTS` may be absent: an extra position then costs as much as a row. Without those of
        `ADAPTER_COEFFICIENTS` adapters cost nothing, and without `TILE_COEFFICIENT` images.

        Raises:
            ValueError: one is missing, unknown, negative or not finite.

        """
        optional = {*EXTRA_COEFFICIENTS, *ADAPTER_COEFFICIENTS, TILE_COEFFICIENT}
        if set(coefficients) - optional != set(COEFFICIENTS):
            raise ValueError(f"a cost model needs the coefficients {', '.join(COEFFICIENTS)}")
        if not all(0.0 <= value < math.inf for value in coefficients.values()):
            raise ValueError(f"costs must be finite and not negative: {dict(coefficients)}")
        model = cls()
        model._coefficients = [float(coefficients[name]) for name in COEFFICIENTS]
        once = coefficients.get("extra_step", 0.0)
        each = coefficients.get("extra_position", coefficients["decode_row"])
        model._extra.costs = [float(once), float(each)]
        model._adapters.costs = [
            coefficients.get(name, 0.0) * unit
            for name, unit in zip(ADAPTER_COEFFICIENTS, _ADAPTER_UNITS, strict=True)
        ]
        model._tile = float(coefficients.get(TILE_COEFFICIENT, 0.0))
        model._frozen = True
        return model

    @classmethod
    def from_json(cls, coefficients: Mapping[str, float]) -> CostModel:
        """Return a model from the result of `to_json`: a fixed one, or one without observations.

        Raises:
            ValueError: as `fixed`.

        """
        return cls.fixed(coefficients) if coefficients else cls()

    def to_json(self) -> dict[str, float]:
        """Return all coefficients, also for extra positions and adapters; empty before the first fit.

        They describe the last hundreds of steps. The pace of the last seconds is left out: it may vary by a tenth and
        more, and does not predict the next hour.
        """
        if not self._coefficients:
            return {}
        named = dict(zip(COEFFICIENTS, self._coefficients, strict=True))
        named |= zip(EXTRA_COEFFICIENTS, self._extra.costs, strict=True)
        if any(self._adapters.costs):
            pairs = zip(ADAPTER_COEFFICIENTS, self._adapters.costs, _ADAPTER_UNITS, strict=True)
            named |= {name: cost / unit for name, cost, unit in pairs}
        if self._tile:
            named[TILE_COEFFICIENT] = self._tile
        return named

    def learned(self) -> dict[str, Any]:
        """Return all that it has learned, in types of JSON, for `resumed`."""
        return {
            "coefficients": self._coefficients,
            "pace": self._pace,
            "observed": (self._num_observed, self._next_fit),
            "turn_seconds": self.overhead.turn_seconds,
            "tiles": (self._tile, self._num_tiles),
            "ratios": self.jitter.learned(),
            **{name: part.learned() for name, part in self._parts()},
        }

    @classmethod
    def resumed(cls, learned: Mapping[str, Any]) -> CostModel:
        """Return a model that continues from the result of `learned`.

        Raises:
            KeyError, TypeError, ValueError: it is no such result.

        """
        model = cls()
        model._coefficients, model._pace = learned["coefficients"], learned["pace"]
        model._num_observed, model._next_fit = learned["observed"]
        model.overhead.turn_seconds = learned["turn_seconds"]
        model._tile, model._num_tiles = learned["tiles"]
        for ratio in learned["ratios"]:
            model.jitter.add(ratio)
        for name, part in model._parts():
            part.resume(learned[name])
        return model

    def _parts(self) -> Iterator[tuple[str, NormalEquations | ResidualCosts]]:
        yield "decode_steps", self._decode_steps
        yield "prefill_steps", self._prefill_steps
        yield "extra", self._extra
        yield "adapters", self._adapters

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from an answered step; one without a forward pass or without a duration does not count."""
        computes = load.decodes or load.prefill_tokens or load.tiles
        if self._frozen or not computes or not 0.0 < seconds < math.inf:
            return
        if load.tiles:
            self._observe_tiles(load.tiles, seconds)
            return
        features = _features(load)
        plain = self._pace * sum(map(float.__mul__, self._coefficients, features))
        if load.adapter_slices and plain:
            seconds = self._without_adapters(load, seconds, plain)
        if (last := self._last_with_extra) is not None:
            # Verification of draft tokens runs in the next step, which therefore is no observation of a plain step.
            after = 0.0 if load.extra_positions else seconds - plain
            self._extra.add(last.extra, last.seconds + after, plain=last.plain, pace=last.pace)
        self._last_with_extra = None
        if load.extra_positions and self._coefficients:
            self._last_with_extra = _StepWithExtra(_extra(load), seconds, plain, self._pace)
        if load.extra_positions or last is not None:
            return
        self._extra.idle(_IDLE_MEMORY)
        expected = sum(map(float.__mul__, self._coefficients, features)) or seconds
        if self._coefficients:
            self.jitter.add(seconds / expected)
            paced = self._pace * expected
            self._pace *= 1.0 + _PACE_RATE * (seconds - paced) / max(seconds, paced)
        memory = self._prefill_steps if load.prefill_tokens else self._decode_steps
        memory.add(features, seconds, 1.0 / (expected * max(expected, seconds)))
        self._num_observed += 1
        if self._num_observed >= self._next_fit:
            self._next_fit += min(self._next_fit, _FIT_EVERY)
            self._fit()

    def _observe_tiles(self, count: float, seconds: float) -> None:
        """Learn from an encoding step; one that takes too long pulls no harder than one that takes no time."""
        self._num_tiles += 1
        rate, each = max(_TILE_RATE, 1 / self._num_tiles), seconds / count
        self._tile += rate * (min(each, 2 * self._tile) - self._tile) if self._tile else each

    @property
    def tile_seconds(self) -> float:
        """Seconds that a tile of an image takes; 0 before the first one."""
        return self._tile

    @property
    def is_known(self) -> bool:
        """Whether there are predictions."""
        return bool(self._coefficients)

    def seconds(self, load: StepLoad) -> float | None:
        """Return the expected duration of a step; None before the first fit."""
        if load.tiles:
            return load.tiles * self._tile if self._tile else None
        if not self._coefficients:
            return None
        seconds = sum(map(float.__mul__, self._coefficients, _features(load)))
        if load.extra_positions:
            seconds += self._extra.seconds(_extra(load))
        if load.adapter_slices:
            seconds += self._adapters.seconds(_adapters(load))
        return self._pace * seconds

    def extra_prices(self) -> tuple[float, float, float] | None:
        """Return seconds for decodes of more than one position; None before the first fit.

        For any in a step; for each position beyond a row's first; for each position that such a position attends to.
        """
        if not self._coefficients:
            return None
        pace, (once, each) = self._pace, self._extra.costs
        return pace * once, pace * each, pace * self._coefficients[2]

    def seconds_beside_prompts(self, load: StepLoad) -> float | None:
        """The duration of a step of `load` with prompts, less what their tokens cost; None before the first fit."""
        seconds = self.seconds(load)
        return None if seconds is None else seconds + self._pace * self._coefficients[3]

    def seconds_for_prompts(self, seconds: float, load: StepLoad) -> float:
        """Seconds that prompts may add to a step of `load`, for it to last `seconds`; infinity before the first fit."""
        beside = self.seconds_beside_prompts(load)
        return math.inf if beside is None else seconds - beside

    def prompt_tokens_within(self, seconds: float, *, start: int, most: int) -> int:
        """Return the most tokens of a prompt, up to `most` from position `start` on, that take `seconds`."""
        if seconds <= 0.0:
            return 0
        if not self._coefficients or seconds == math.inf:
            return most
        # Token i of the chunk attends to start + i positions: n tokens cost quadratic * n² + linear * n.
        token, pair = self._coefficients[4:]
        rest, quadratic, linear = seconds / self._pace, pair / 2, token + pair * (start + 0.5)
        root = linear + math.sqrt(linear * linear + 4 * quadratic * rest)
        return most if 2 * rest >= most * root else math.floor(2 * rest / root)

    @property
    def prefill_step_seconds(self) -> float:
        """What any prompt tokens add to a step, besides the tokens themselves; 0 before the first fit."""
        return self._pace * self._coefficients[3] if self._coefficients else 0.0

    def prompt_seconds(self, num_tokens: float, *, start: float) -> float:
        """Return seconds that `num_tokens` of a prompt take from position `start` on; 0 before the first fit."""
        if not self._coefficients:
            return 0.0
        token, pair = self._coefficients[4:]
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) / 2
        return self._pace * (token * num_tokens + pair * pairs)

    def _without_adapters(self, load: StepLoad, seconds: float, plain: float) -> float:
        """Learn the cost of a step's adapters; return the duration that is left for the rest of the step.

        Adapters and the rest are fitted in turns, each to what the other leaves.
        """
        counts = _adapters(load)
        self._adapters.add(counts, seconds, plain=plain, pace=self._pace)
        return max(seconds - self._pace * self._adapters.seconds(counts), plain / 2)

    def _fit(self) -> None:
        """Solve the normal equations in units of `_PRIOR`, scaled by the one number that fits the observations best."""
        change = 1.0 if 1 / _NEW_MACHINE < self._pace < _NEW_MACHINE else self._pace
        self._pace /= change
        for memory in (self._decode_steps, self._prefill_steps):
            memory.rescale(change)
        self._extra.rescale(change)
        self._adapters.rescale(change)
        gram, moment = self._prefill_steps.plus(self._decode_steps)
        size = range(len(_PRIOR))
        moment = [moment[i] * _SCALE[i] for i in size]
        gram = [[gram[i][j] * _SCALE[i] * _SCALE[j] for j in size] for i in size]
        likely = [i for i in size if _PRIOR[i]]
        unit = sum(moment[i] for i in likely) / sum(gram[i][j] for i in likely for j in likely)
        # Ridge towards 1 where the prior is not 0, and towards 0 elsewhere.
        matrix = [
            [unit * unit * gram[i][j] + (_RIDGE if i == j else 0.0) for j in size] for i in size
        ]
        right = [unit * moment[i] + (_RIDGE if _PRIOR[i] else 0.0) for i in size]
        solution = solve_nonnegative(matrix, right)
        self._coefficients = [unit * _SCALE[i] * solution[i] for i in size]
        trust = _EXTRA_TRUST / (self._coefficients[0] or unit) ** 2
        self._extra.assume((0.0, self._coefficients[1]), (trust, trust * _TYPICAL_EXTRA**2))


def _extra(load: StepLoad) -> tuple[float, float]:
    """In the order of `EXTRA_COEFFICIENTS`."""
    return float(load.extra_positions > 0), float(load.extra_positions)


def _adapters(load: StepLoad) -> tuple[float, float]:
    """In the order of `ADAPTER_COEFFICIENTS`."""
    return load.adapter_bytes / _ADAPTER_UNITS[0], load.adapter_slices / _ADAPTER_UNITS[1]


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
