"""The latency of a small tenant beside one that sends fifty times more."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from bench.parts.client import Answer, Client, Request, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part, Table
from bench.parts.workloads import (
    first_tokens,
    milliseconds,
    poisson_seconds,
    saturated_rate,
)

PROMPT_TOKENS, NEW_TOKENS, BATCH_SIZE = 64, 16, 8
TIMES_MORE = 50
OVERLOAD = 1.2
"""The large tenant's rate, as a factor on the server's capacity."""
GOAL = 2.0
"""Goal: the small tenant's p90 TTFT, as a factor on that without the large tenant."""
RATIO = "loaded / alone"

CASES = (
    Case("--fairness tenant", ("--fairness=tenant",)),
    Case("the same, --late-planning off", ("--fairness=tenant", "--late-planning=off")),
    Case("--fairness none", ("--fairness=none",)),
)


def requests(fixture: Fixture, tenant: str, moments: Sequence[float]) -> list[Request]:
    """One request of a tenant for each time."""
    seed = fixture.seed(f"tenant {tenant}")
    return [
        Request(
            prompt=fixture.texts.prompt(PROMPT_TOKENS, seed=f"{seed}/{number}"),
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=NEW_TOKENS,
            due=due,
            headers={"x-tenant": tenant},
        )
        for number, due in enumerate(moments)
    ]


async def measure(fixture: Fixture, url: str) -> Figures:
    """Measure the capacity, then the small tenant alone, then both."""
    async with Client(url) as client:
        burst = requests(fixture, "warm-up", [0.0] * (BATCH_SIZE * fixture.sized(12, 4)))
        capacity = saturated_rate(succeeded(await open_loop(client, burst)))
        rate, count = OVERLOAD * capacity, fixture.sized(24, 6)
        seldom = poisson_seconds(rate / TIMES_MORE, count, seed=fixture.seed("small"))
        often = poisson_seconds(rate, TIMES_MORE * count, seed=fixture.seed("large"))
        alone = await open_loop(client, requests(fixture, "small alone", seldom))
        both = requests(fixture, "small", seldom) + requests(fixture, "large", often)
        answers = await open_loop(client, both)
    return figures(succeeded(alone), succeeded(answers), capacity=capacity)


def figures(alone: Sequence[Answer], both: Sequence[Answer], *, capacity: float) -> Figures:
    """p90 TTFT of the small tenant without and with the large one."""
    small = [a for a in both if a.request.headers["x-tenant"] == "small"]
    large = [a for a in both if a.request.headers["x-tenant"] == "large"]
    (before,) = milliseconds(first_tokens(alone), 0.9)
    (after,) = milliseconds(first_tokens(small), 0.9)
    return {
        "requests/s at most": capacity,
        "small alone, TTFT p90, ms": before,
        "small loaded, TTFT p50, ms": milliseconds(first_tokens(small), 0.5)[0],
        "small loaded, TTFT p90, ms": after,
        RATIO: after / before,
        "large, mean TTFT, ms": 1000 * fmean(first_tokens(large)),
    }


def run(fixture: Fixture, case: Case) -> Figures:
    with fixture.serving(f"--max-batch-size={BATCH_SIZE}", *case.flags) as server:
        return asyncio.run(measure(fixture, server.url))


def conclude(table: Table) -> Sequence[str]:
    """The ratio and the goal."""
    ratio = table[CASES[0].name][RATIO].median
    verdict = "met" if ratio <= GOAL else "missed"
    return [
        f"The small tenant's p90 TTFT is {ratio:.2f} times that alone (goal {GOAL:.0f}, {verdict})."
    ]


PART = Part(
    name="tenants",
    title="Fairness between tenants",
    method=(
        f"Requests of {PROMPT_TOKENS} prompt and {NEW_TOKENS} new tokens in a batch of at most"
        f" {BATCH_SIZE}. The large tenant sends {OVERLOAD} times what the server can do, as a Poisson"
        " process; the small one a fiftieth of that, first alone and then, at the same moments, beside"
        " the large one."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
