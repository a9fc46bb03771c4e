"""The accuracy of forecasts where steps cost exactly what the cost model says: simulated, without a server."""

from __future__ import annotations

import random
from collections.abc import Mapping
from statistics import median

from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part
from bench.scheduling.watched_engine import watched
from millrace.simulate.simulated_request import Arrival

PIPELINES: Mapping[str, Mapping[str, object]] = {
    "chunks": {},
    "chunks, planned early": {"late_planning": "off"},
    "chunks, one step in flight": {"steps_in_flight": 1},
}
CASES = tuple(
    Case(f"{name}, {share} of capacity", (name,), share)
    for name in PIPELINES
    for share in (0.5, 0.8, 1.2)
)


def arrivals(count: int, rate: float, *, seed: str) -> list[Arrival]:
    """Prompts of 148 tokens in the median (lognormal, sigma 0.6) and answers of 80 in the mean (exponential)."""
    rng, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate) if rate else 0.0
        prompt = max(1, int(rng.lognormvariate(5, 0.6)))
        found.append(Arrival(now, prompt, 1 + int(rng.expovariate(1 / 80))))
    return found


def run(fixture: Fixture, case: Case) -> Figures:
    """A third of the requests only teaches the forecaster the length of answers."""
    count, changes = fixture.sized(3000, 200), PIPELINES[case.flags[0]]
    burst = watched(arrivals(count, 0.0, seed=fixture.seed("burst")), **changes)
    rate = case.amount * len(burst.first) / max(burst.first.values())
    engine = watched(arrivals(count, rate, seed=fixture.seed("forecasts")), **changes)
    figures, numbers = {}, range(count // 3, count)
    for title, realised, predicted in (
        ("queue", engine.queue, [each.queue_seconds for each in engine.predictions]),
        ("TTFT", engine.first, [each.first_token_seconds for each in engine.predictions]),
    ):
        errors = [abs(predicted[number] - realised[number]) for number in numbers]
        figures[f"{title} p50, ms"] = 1000 * median(realised[number] for number in numbers)
        figures[f"{title} error p50, ms"] = 1000 * median(errors)
    return figures


PART = Part(
    name="forecasts",
    title="Accuracy of forecasts in simulation",
    method=(
        "Simulated with the costs of a 135M model on two cores: 32 places, prompts of 148 tokens in the"
        " median, answers of 80 in the mean of unannounced length, a Poisson process at a share of"
        " what is served of a burst. Absolute errors beside the times themselves, medians over requests."
    ),
    cases=CASES,
    run=run,
)
