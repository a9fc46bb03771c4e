"""Forecasts against the simulator, which knows the answer lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from millrace.simulate.deployment import Deployment
from millrace.simulate.pipeline import Flight
from millrace.simulate.simulated_request import Arrival
from millrace_router.prediction.cost import COEFFICIENTS, CostModel
from millrace_router.prediction.step_load import StepLoad
from millrace_testing.router.watched_engine import COSTS, WatchedEngine, watched

COST = dict(zip(COEFFICIENTS, COSTS, strict=True))
LIMIT = 4096


def poisson(
    seed: int, count: int, rate: float, length: Callable[[random.Random], int]
) -> list[Arrival]:
    rng, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = max(1, int(rng.lognormvariate(5, 0.6)))
        arrivals.append(Arrival(now, prompt, length(rng), LIMIT))
    return arrivals


def heavy_tail(rng: random.Random) -> int:
    return min(2000, 1 + int(rng.lognormvariate(4, 0.8)))


def exponential(rng: random.Random) -> int:
    return 1 + int(rng.expovariate(1 / 80))


def served(arrivals: list[Arrival], **flags: object) -> WatchedEngine:
    return watched(arrivals, **({"max_batch_prefill_tokens": 1024} | flags))


def errors(engine: WatchedEngine, *, warm: int = 200, least: float = 0.5) -> list[float]:
    """Signed relative errors of the queue time of requests that waited, except the first `warm` requests."""
    return [
        engine.predictions[number].queue_seconds / waited - 1
        for number, waited in engine.queue.items()
        if number >= warm and waited >= least
    ]


SCENARIOS: dict[str, tuple[list[Arrival], dict[str, object], float, float]] = {
    "equal lengths": (poisson(1, 1000, 12, lambda _: 80), {}, 0.08, 0.05),
    "memoryless lengths": (poisson(1, 1000, 12, exponential), {}, 0.2, 0.1),
    "heavy tail": (poisson(2, 1000, 13, heavy_tail), {}, 0.2, 0.1),
    "bursts": (
        [
            Arrival(60.0 * burst, 150, heavy_tail(random.Random(1000 * burst + number)), LIMIT)
            for burst in range(6)
            for number in range(200)
        ],
        {},
        0.2,
        0.15,
    ),
    "few blocks": (
        [each._replace(max_new_tokens=None) for each in poisson(2, 1000, 6, heavy_tail)],
        {"num_blocks": 150, "max_total_tokens": 2384, "max_input_tokens": 2000},
        0.35,
        0.2,
    ),
}
"""Arrivals, flags, bounds of the median relative error of the queue time and of its bias."""


PIPELINES = pytest.mark.parametrize(
    "pipeline",
    [{"late_planning": "off"}, {}, {"steps_in_flight": 1}],
    ids=["early", "late", "one step in flight"],
)


@PIPELINES
@pytest.mark.parametrize("name", SCENARIOS)
def test_queue_time_under_load_is_predicted(name: str, pipeline: dict[str, object]) -> None:
    arrivals, flags, most, bias = SCENARIOS[name]
    found = errors(served(arrivals, **flags, **pipeline))
    assert len(found) > 300
    assert median(map(abs, found)) < most
    assert abs(median(found)) < bias


@PIPELINES
def test_first_token_is_predicted_with_and_without_a_queue(pipeline: dict[str, object]) -> None:
    for rate, most in ((4, 0.1), (12, 0.2)):
        engine = served(poisson(3, 800, rate, exponential), **pipeline)
        predicted = [each.first_token_seconds for each in engine.predictions]
        found = [abs(predicted[n] / engine.first[n] - 1) for n in range(200, 800)]
        assert median(found) < most


@PIPELINES
@pytest.mark.parametrize("order", ["shortest", "arrival"])
def test_the_first_token_of_short_prompts_beside_long_ones_is_predicted(
    order: str, pipeline: dict[str, object]
) -> None:
    """Every tenth prompt takes some steps; the predicted delay of short ones follows the order of service."""
    rng, now, arrivals = random.Random(7), 0.0, []
    for number in range(600):
        now += rng.expovariate(3)
        arrivals.append(Arrival(now, 3000 if number % 10 == 0 else 30, exponential(rng), LIMIT))
    engine = served(arrivals, prefill_order=order, **pipeline)
    shorts = [n for n in range(200, 600) if arrivals[n].prompt_tokens == 30]
    found = [engine.predictions[n].first_token_seconds / engine.first[n] - 1 for n in shorts]
    assert median(map(abs, found)) < 0.2
    assert abs(median(found)) < 0.1
    # Requests that came with a long prompt are the slow ones.
    slow = sorted(shorts, key=lambda n: engine.first[n])[-len(shorts) // 5 :]
    wrong = [engine.predictions[n].first_token_seconds / engine.first[n] - 1 for n in slow]
    assert median(map(abs, wrong)) < 0.35


@pytest.mark.parametrize("rate", [4, 10, 12])
def test_the_end_is_predicted_if_lengths_are_equal(rate: int) -> None:
    engine = served(poisson(4, 800, rate, lambda _: 80))
    predicted = [each.finish_seconds for each in engine.predictions]
    found = [predicted[n] / engine.last[n] - 1 for n in range(200, 800)]
    assert median(map(abs, found)) < 0.1
    assert abs(median(found)) < 0.03


def test_limits_that_are_always_met_are_known_lengths() -> None:
    arrivals = poisson(5, 1000, 13, exponential)
    met = [each._replace(max_new_tokens=each.output_tokens) for each in arrivals]
    found = errors(served(met))
    assert len(found) > 200
    assert median(map(abs, found)) < 0.12


def test_it_works_with_a_cost_model_that_learns_from_noisy_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, learned, known = random.Random(6), CostModel(), CostModel.fixed(COST)
    ratios = [rng.uniform(0.9, 1.1) * (5 if rng.random() < 0.02 else 1) for _ in range(2000)]
    for load in (StepLoad(500, 125_000, 1), *(StepLoad(decodes=n, context=n) for n in range(1, 9))):
        learned.observe(load, known.seconds(load) or 0.0)
    init, answer = WatchedEngine.__init__, WatchedEngine._answer

    def with_learned(self: WatchedEngine, deployment: Deployment) -> None:
        init(self, deployment)
        self._admission.forecaster._cost = learned

    def observed(self: WatchedEngine, flight: Flight) -> None:
        learned.observe(flight.plan.load, flight.seconds)
        answer(self, flight)

    monkeypatch.setattr(WatchedEngine, "__init__", with_learned)
    monkeypatch.setattr(WatchedEngine, "_answer", observed)
    mean = sum(ratios) / len(ratios)
    found = errors(served(poisson(6, 1000, 12 / mean, heavy_tail), step_ratios=tuple(ratios)))
    assert len(found) > 300
    assert median(map(abs, found)) < 0.25
