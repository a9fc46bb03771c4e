"""The simulator tells when each request ends, under every policy."""

from __future__ import annotations

from typing import Any

import pytest
from bench.parts.client import Request
from bench.parts.simulation import SimulationFailed, TimedEngine, simulate
from bench.policies.static_planner import NaiveEngine, StaticEngine

from millrace.simulate.deployment import Deployment

LENGTHS = (2, 4, 3)


def deployment(**changes: Any) -> Deployment:
    """Every step takes a second, whatever it computes."""
    coefficients = ("decode_row", "decode_context_token", "prefill_step", "prefill_token")
    values = {
        "cost_model": {"step": 1.0, "prefill_pair": 0.0, **dict.fromkeys(coefficients, 0.0)},
        "num_blocks": 100,
        "block_size": 16,
        "max_total_tokens": 64,
        "max_batch_size": 2,
        "steps_in_flight": 1,
        **changes,
    }
    return Deployment.model_validate(values)


def requests(*, due: float = 0.0) -> list[Request]:
    return [
        Request(prompt="", prompt_tokens=8, output_tokens=length, due=due) for length in LENGTHS
    ]


@pytest.mark.parametrize(
    ("engine", "batch_size", "seconds"),
    [
        # The third request takes the slot of the first.
        (TimedEngine, 2, [2.0, 4.0, 5.0]),
        # It waits until both have ended.
        (StaticEngine, 2, [2.0, 4.0, 7.0]),
        (NaiveEngine, 2, [2.0, 4.0, 7.0]),
        (TimedEngine, 1, [2.0, 6.0, 9.0]),
    ],
)
def test_requests_end_when_their_policy_lets_them(
    engine: type[TimedEngine], batch_size: int, seconds: list[float]
) -> None:
    outcomes = simulate(deployment(max_batch_size=batch_size), requests(), engine)
    assert [outcome.seconds for outcome in outcomes] == pytest.approx(seconds)


def test_latency_counts_from_the_arrival_with_what_the_router_takes() -> None:
    outcomes = simulate(deployment(entry_seconds=0.25), requests(due=3.0))
    assert [outcome.seconds for outcome in outcomes] == pytest.approx([2.25, 4.25, 5.25])


def test_a_refused_request_is_an_error() -> None:
    with pytest.raises(SimulationFailed, match="too long"):
        simulate(deployment(max_total_tokens=9), requests())
