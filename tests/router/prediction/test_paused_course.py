"""Forecasts where prompts pause decodes, against the simulator: the real planner under a virtual clock."""

from __future__ import annotations

import random
from statistics import median

import pytest
from bench.scheduling.watched_engine import watched

from millrace_router.simulator.candidate import Arrival

PAUSES: dict[str, object] = {"prefill_chunking": "off"}


def poisson(count: int, rate: float) -> list[Arrival]:
    rng, now, arrivals = random.Random(11), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt = max(1, int(rng.lognormvariate(5, 0.6)))
        arrivals.append(Arrival(now, prompt, 1 + int(rng.expovariate(1 / 80))))
    return arrivals


LOADS: dict[str, tuple[float, float, dict[str, object]]] = {
    "half of capacity": (5, 0.15, {}),
    "most of capacity": (8, 0.3, {}),
    "most of capacity, planned early": (8, 0.3, {"late_planning": "off"}),
    "most of capacity, one step in flight": (8, 0.3, {"steps_in_flight": 1}),
    "patience alone": (8, 0.1, {"waiting_served_ratio": 10.0}),
    "numbers alone": (8, 0.45, {"max_waiting_tokens": 10_000}),
    "overload of a large batch": (17, 0.25, {"max_batch_size": 128}),
}
"""Arrivals per second, what the median error may be of the median time, and flags.

Where others who arrive would end the wait, only their rate is known.
"""


@pytest.mark.parametrize("name", LOADS)
def test_queue_and_first_token_under_load_are_foreseen(name: str) -> None:
    rate, most, flags = LOADS[name]
    engine = watched(poisson(500, rate), **PAUSES | flags)
    for realised, predicted in (
        (engine.queue, [each.queue_seconds for each in engine.predictions]),
        (engine.first, [each.first_token_seconds for each in engine.predictions]),
    ):
        numbers = range(150, 500)
        error = median(abs(predicted[number] - realised[number]) for number in numbers)
        assert error < most * median(realised[number] for number in numbers)


@pytest.mark.parametrize(
    "flags", [{}, {"late_planning": "off"}, {"steps_in_flight": 1}], ids=["late", "early", "one"]
)
def test_a_lone_request_waits_for_patience_to_be_spent_whenever_it_comes(
    flags: dict[str, object],
) -> None:
    """Ten answers of known length begin at 0; one more request comes in their prefill or between their decodes."""
    ten = [Arrival(0.0, 200, 200, 200)] * 10
    for now in (0.03 * part for part in range(1, 20)):
        engine = watched([*ten, Arrival(now, 200, 200, 200)], **PAUSES | flags)
        found = engine.predictions[10]
        assert found.queue_seconds == pytest.approx(engine.queue[10], rel=0.003, abs=1e-4)
        assert found.first_token_seconds == pytest.approx(engine.first[10], rel=0.003)
