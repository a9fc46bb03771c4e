"""Simulated requests per second on one core."""

from __future__ import annotations

import time

from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part, Table
from millrace.simulate.deployment import Deployment
from millrace.simulate.simulation import Simulation, simulate
from millrace.simulate.workload import Lengths, Workload

COSTS = {
    "step": 0.012,
    "decode_row": 0.00012,
    "decode_context_token": 4e-8,
    "prefill_step": 0.004,
    "prefill_token": 0.00006,
    "prefill_pair": 4e-9,
}
CASES = tuple(Case(f"{rate:g} requests/s", amount=rate) for rate in (1, 2, 4, 6, 8))
RATE, MILLION = "simulated requests a second", "minutes for a million"


def run(fixture: Fixture, case: Case) -> Figures:
    """Simulate one load; the time is CPU time, so that other processes hardly change it."""
    simulation = Simulation(
        deployment=Deployment(
            cost_model=COSTS, num_blocks=1500, block_size=16, max_total_tokens=4096
        ),
        workload=Workload(
            requests=fixture.sized(50_000, 300),
            rate=case.amount,
            prompt_tokens=Lengths.parse("lognormal:300:1:3000"),
            output_tokens=Lengths.parse("lognormal:120:1:1000"),
        ),
    )
    began = time.process_time()
    (metrics,) = simulate([simulation])
    seconds = time.process_time() - began
    return {
        "batch size, mean": metrics.row_seconds / metrics.busy_seconds,
        "steps of a request": metrics.steps / metrics.finished,
        RATE: metrics.finished / seconds,
        MILLION: 1e6 / 60 * seconds / metrics.finished,
    }


def conclude(table: Table) -> list[str]:
    """The time for a million requests."""
    minutes = [row[MILLION].median for row in table.values()]
    return [
        f"A million requests take {min(minutes):.0f} to {max(minutes):.0f} minutes on one core."
    ]


PART = Part(
    name="speed",
    title="Speed of the simulator",
    method=(
        "`millrace-simulate`'s own loop on one core, over the load of docs/simulator.md: lognormal prompts"
        " (median 300) and answers (median 120), 1 500 blocks. In CPU seconds."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
