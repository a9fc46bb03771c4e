"""Latency per token over throughput, after the Orca paper (Yu et al., OSDI 2022, figure 10)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from bench.harness.command_line import say
from bench.parts.client import Request
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.parts.part import Case, Figures, Table
from bench.parts.workloads import poisson_seconds, saturated_rate, uniform_lengths
from bench.policies.experiment import CONTINUOUS, STATIC, Experiment, requests, send, serving
from bench.policies.outcomes import (
    beside_simulation,
    conclude_ratios,
    median_normalised_ms,
    outcomes_of,
    ratio_in_hindsight,
    simulated,
    tokens_per_second,
)
from millrace.charts.lines import Panel, curves

BATCH_SIZES = (1, 4, 16, 32)
SHARES = (0.4, 0.7, 0.9)
"""Rates of arrival, as shares of the continuous server's capacity at the same batch size."""
SECONDS, LEAST_REQUESTS = 12, 20
LEAST_PROMPT, MOST_PROMPT, MOST_OUTPUT = 32, 128, 128
CONTENDERS = (CONTINUOUS, STATIC)
OFFERED, RATE, LATENCY = "requests/s", "tokens/s", "median ms a token"
COMPARED = (RATE, LATENCY)


def case_name(batch_size: int, share: float, policy: str) -> str:
    """The name of a row."""
    return f"batch size {batch_size}, {100 * share:.0f} %, {policy}"


def asked_at(fixture: Fixture, moments: Sequence[float], *, name: str) -> list[Request]:
    """A request for each moment: lengths are the same under every name, prompts are not."""
    seed, count = fixture.seed("lengths"), len(moments)
    prompts = uniform_lengths(count, least=LEAST_PROMPT, most=MOST_PROMPT, seed=f"{seed}/prompts")
    lengths = uniform_lengths(count, least=1, most=MOST_OUTPUT, seed=f"{seed}/answers")
    seed = fixture.seed(f"load {name}")
    return requests(fixture, prompts, lengths, moments=moments, seed=seed)


def figures(outcomes: Sequence[Outcome]) -> Figures:
    """Throughput and normalised latency."""
    return {RATE: tokens_per_second(outcomes), LATENCY: median_normalised_ms(outcomes)}


def at_rate(fixture: Fixture, url: str, policy: str, rate: float, *, name: str) -> Figures:
    """Figures of one server at `rate` requests a second."""
    count = max(fixture.sized(LEAST_REQUESTS, 6), round(rate * fixture.sized(SECONDS, 0)))
    moments = poisson_seconds(rate, count, seed=fixture.seed("arrivals"))
    asked = asked_at(fixture, moments, name=name)
    compared = beside_simulation(
        url, policy, asked, lambda: outcomes_of(asyncio.run(send(url, asked))), figures, COMPARED
    )
    return {OFFERED: rate, **compared}


def run(fixture: Fixture) -> Iterator[tuple[str, Figures]]:
    """At each batch size the continuous server first: the burst of its warm-up shows the capacity."""
    for batch_size in BATCH_SIZES:
        capacity = 0.0
        for policy in CONTENDERS:
            found = {}
            with serving(fixture, policy, batch_size=batch_size) as url:
                burst = asked_at(fixture, [0.0] * max(8, 4 * batch_size), name="warm-up")
                answers = asyncio.run(send(url, burst))
                capacity = capacity or saturated_rate(answers)
                for share in SHARES:
                    name = case_name(batch_size, share, policy)
                    say(f"load: {name}, {share * capacity:.2f} requests/s")
                    found[name] = at_rate(
                        fixture, url, policy, share * capacity, name=f"{batch_size}/{share}"
                    )
            yield from found.items()


def conclude(table: Table) -> Sequence[str]:
    """Both at the highest rate of each batch size, and points that are simulated badly."""
    lines = []
    for batch_size in BATCH_SIZES:
        continuous, static = (
            table[case_name(batch_size, SHARES[-1], policy)] for policy in CONTENDERS
        )
        lines.append(
            f"Batch size {batch_size}, {100 * SHARES[-1]:.0f} % of capacity: continuous takes"
            f" {continuous[LATENCY].median:.1f} ms a token at {continuous[RATE].median:.0f} tokens/s,"
            f" static {static[LATENCY].median:.1f} ms at {static[RATE].median:.0f}."
        )
    return [*lines, conclude_ratios(table, COMPARED)]


def chart(title: str, table: Table) -> str:
    """A panel for each batch size, with the normalised latency over throughput."""

    def points(batch_size: int, policy: str, prefix: str) -> list[tuple[float, float]]:
        rows = [table[case_name(batch_size, share, policy)] for share in SHARES]
        return [(row[prefix + RATE].median, row[prefix + LATENCY].median) for row in rows]

    panels = [
        Panel(
            title=f"Median latency, ms an output token: batch size {batch_size}",
            points={policy: points(batch_size, policy, "") for policy in CONTENDERS},
            simulated={policy: points(batch_size, policy, simulated("")) for policy in CONTENDERS},
            x_title="output tokens per second",
            rounds=True,
        )
        for batch_size in BATCH_SIZES
    ]
    return curves(title, panels)


EXPERIMENT = Experiment(
    name="load",
    title="Latency per token over throughput",
    method=(
        "Orca's shape is prompts of 32 to 512 tokens and answers of 1 to 128, both uniform. Here: prompts of"
        f" {LEAST_PROMPT} to {MOST_PROMPT}, answers of 1 to {MOST_OUTPUT}. Requests arrive for {SECONDS} s (at"
        f" least {LEAST_REQUESTS}) as a Poisson process. The rates are shares of what the continuous server of"
        " the same batch size does of a burst of such requests, and the same for both policies. `continuous`"
        " schedules iterations, `static` requests. Normalised latency: from arrival to the last token, over"
        " the number of output tokens; the median over requests. A rate beyond the capacity of a policy makes"
        " its queue grow, so its latencies depend on the length of the run. The simulator has the costs that"
        " the server has learned before the run, in hindsight those after it."
    ),
    cases=tuple(
        Case(case_name(batch_size, share, policy), amount=share)
        for batch_size in BATCH_SIZES
        for share in SHARES
        for policy in CONTENDERS
    ),
    run=run,
    conclude=conclude,
    chart=chart,
    hidden=tuple(map(ratio_in_hindsight, COMPARED)),
)
