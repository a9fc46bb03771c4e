"""The distribution of request latency under Poisson arrivals, after Anyscale's benchmark (2023)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from bench.harness.command_line import say
from bench.parts.client import Request
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.parts.part import Case, Figures, Table
from bench.parts.workloads import exponential_lengths, poisson_seconds, saturated_rate
from bench.policies.experiment import CONTINUOUS, NAIVE, STATIC, Experiment, requests, send, serving
from bench.policies.outcomes import (
    beside_simulation,
    conclude_ratios,
    outcomes_of,
    simulated,
)
from millrace.charts.lines import Panel, curves
from millrace.load.measurement import quantile

PROMPT_TOKENS, BATCH_SIZE = 32, 64
MEAN_OUTPUT, CAP = 128, 512
SHARES = (0.2, 0.5, 0.8)
"""Rates of arrival, as shares of the continuous server's capacity."""
SECONDS = 20
"""Seconds of arrivals at each rate."""
CONTENDERS = (CONTINUOUS, STATIC, NAIVE)
PERCENTS = (5, *range(10, 100, 10), 95, 99, 100)
SHOWN = (50, 90, 99)
OFFERED = "requests/s"


def case_name(share: float, policy: str) -> str:
    """The name of a row."""
    return f"{100 * share:.0f} % of capacity, {policy}"


def column(percent: int) -> str:
    """The title of a percentile of the latency."""
    return f"p{percent}, s"


COMPARED = (column(50), column(90))


def asked_at(fixture: Fixture, moments: Sequence[float], *, name: str) -> list[Request]:
    """A request for each moment: lengths are the same under every name, prompts are not."""
    count, most = len(moments), fixture.fitting(CAP + PROMPT_TOKENS) - PROMPT_TOKENS
    lengths = exponential_lengths(
        count, mean=MEAN_OUTPUT, most=most, seed=fixture.seed("output lengths")
    )
    seed = fixture.seed(f"latency {name}")
    return requests(fixture, [PROMPT_TOKENS] * count, lengths, moments=moments, seed=seed)


def percentiles(outcomes: Sequence[Outcome]) -> Figures:
    """Percentiles of the latency, in seconds."""
    ordered = sorted(outcome.seconds for outcome in outcomes)
    return {column(percent): quantile(ordered, percent / 100) for percent in PERCENTS}


def at_rate(fixture: Fixture, url: str, policy: str, rate: float, *, name: str) -> Figures:
    """Figures of one server at `rate` requests a second."""
    count = max(12, round(rate * fixture.sized(SECONDS, 1)))
    moments = poisson_seconds(rate, count, seed=fixture.seed("arrivals"))
    asked = asked_at(fixture, moments, name=name)
    compared = beside_simulation(
        url,
        policy,
        asked,
        lambda: outcomes_of(asyncio.run(send(url, asked))),
        percentiles,
        COMPARED,
    )
    return {OFFERED: rate, **compared}


def run(fixture: Fixture) -> Iterator[tuple[str, Figures]]:
    """The continuous server first: a burst of its warm-up shows the capacity that all rates are shares of."""
    batch_size, capacity = fixture.sized(BATCH_SIZE, 4), 0.0
    for policy in CONTENDERS:
        found = {}
        with serving(fixture, policy, batch_size=batch_size) as url:
            num_warm = (3 if policy == CONTINUOUS else 1) * batch_size
            burst = asked_at(fixture, [0.0] * num_warm, name="warm-up")
            answers = asyncio.run(send(url, burst))
            capacity = capacity or saturated_rate(answers)
            for share in SHARES:
                name = case_name(share, policy)
                say(f"latency: {name}, {share * capacity:.2f} requests/s")
                found[name] = at_rate(fixture, url, policy, share * capacity, name=f"{share}")
        yield from found.items()


def conclude(table: Table) -> Sequence[str]:
    """The median latency against continuous batching's, and points that are simulated badly."""
    lines = []
    for share in SHARES:
        medians = {
            policy: table[case_name(share, policy)][column(50)].median for policy in CONTENDERS
        }
        times = (
            f"{medians[policy] / medians[CONTINUOUS]:.1f} times as long with {policy}"
            for policy in CONTENDERS[1:]
        )
        lines.append(
            f"{100 * share:.0f} % of capacity: the median latency is {medians[CONTINUOUS]:.2f} s with continuous,"
            f" {' and '.join(times)}."
        )
    return [*lines, conclude_ratios(table, COMPARED)]


def chart(title: str, table: Table) -> str:
    """A panel for each rate, with the share of requests over their latency."""
    panels = [
        Panel(
            title=f"Answered requests, percent: {100 * share:.0f} % of the continuous server's capacity",
            points={policy: curve(table, case_name(share, policy), "") for policy in CONTENDERS},
            simulated={
                policy: curve(table, case_name(share, policy), simulated(""))
                for policy in CONTENDERS
            },
            x_title="request latency, seconds",
            doubles=True,
            rounds=True,
        )
        for share in SHARES
    ]
    return curves(title, panels)


def curve(table: Table, name: str, prefix: str) -> list[tuple[float, float]]:
    """(latency, percent of the requests) of one row; `prefix` comes before the title of a column."""
    row = table[name]
    return [(row[prefix + column(percent)].median, percent) for percent in PERCENTS]


EXPERIMENT = Experiment(
    name="latency",
    title="Request latency at three rates",
    method=(
        f"Requests of {PROMPT_TOKENS} prompt tokens and exponential answers (mean {MEAN_OUTPUT}, at most"
        f" {CAP}) arrive for {SECONDS} s as a Poisson process; batches of at most {BATCH_SIZE}. The rates are"
        " shares of what the continuous server does of a burst of such requests, and the same for each"
        " policy. Latency: from the arrival to the last token, which is sent at once under every policy. A"
        " rate beyond the capacity of a policy makes"
        " its queue grow, so its latencies depend on the length of the run. The simulator has the costs that"
        " the server has learned before the run."
    ),
    cases=tuple(Case(case_name(share, policy)) for share in SHARES for policy in CONTENDERS),
    run=run,
    conclude=conclude,
    chart=chart,
    hidden=tuple(
        title
        for percent in PERCENTS
        for title in (
            *(() if percent in SHOWN else (column(percent),)),
            *(() if column(percent) in COMPARED else (simulated(column(percent)),)),
        )
    ),
)
