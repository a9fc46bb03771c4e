"""Throughput over the variance of output lengths, after Anyscale's benchmark of continuous batching (2023)."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from bench.harness.command_line import say
from bench.parts.client import Request
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.parts.part import Case, Figures, Table
from bench.parts.workloads import exponential_lengths
from bench.policies.experiment import (
    CONTINUOUS,
    NAIVE,
    NONE,
    POLICIES,
    Experiment,
    requests,
    send,
    serving,
)
from bench.policies.outcomes import (
    beside_simulation,
    conclude_ratios,
    outcomes_of,
    simulated,
    tokens_per_second,
)
from bench.policies.plug import send_behind_plug
from millrace.charts.lines import Panel, curves

NUM_PROMPTS, PROMPT_TOKENS, BATCH_SIZE = 256, 32, 64
MEAN_OUTPUT = 128
CAPS = (32, 128, 512, 1536)
WARM_UP_CAP = 128
NUM_ALONE = 16
"""Prompts, the first ones, that one request at a time has to answer."""
GOAL = 4.0
"""Goal: continuous over naive static batching at the highest variance."""
RATE, SPREAD = "tokens/s", "variance of lengths"


def case_name(cap: int, policy: str) -> str:
    """The name of a row."""
    return f"at most {cap}, {policy}"


def lengths(fixture: Fixture, cap: int) -> list[int]:
    """Output lengths of all prompts; each cap cuts the same draws."""
    most = fixture.fitting(cap + PROMPT_TOKENS) - PROMPT_TOKENS
    count = fixture.sized(NUM_PROMPTS, 12)
    return exponential_lengths(
        count, mean=MEAN_OUTPUT, most=most, seed=fixture.seed("output lengths")
    )


def prompts_for(fixture: Fixture, drawn: Sequence[int], name: str) -> list[Request]:
    """A request for each length, all due at once, with prompts that no other name has."""
    return requests(fixture, [PROMPT_TOKENS] * len(drawn), drawn, seed=fixture.seed(name))


def answered(fixture: Fixture, url: str, asked: Sequence[Request], policy: str) -> list[Outcome]:
    """The outcomes of requests that all wait before the first batch is formed."""
    if policy == CONTINUOUS:
        return outcomes_of(asyncio.run(send(url, asked)))
    return asyncio.run(send_behind_plug(fixture, url, asked))


def served(fixture: Fixture, policy: str) -> dict[str, Figures]:
    """Figures of one policy at each cap, by the name of the case."""
    batch_size = fixture.sized(BATCH_SIZE, 4)
    found: dict[str, Figures] = {}
    first = NUM_ALONE if policy == NONE else NUM_PROMPTS
    num_warm = 4 if policy == NONE else 2 * batch_size
    with serving(fixture, policy, batch_size=batch_size) as url:
        warm = lengths(fixture, WARM_UP_CAP)[:num_warm]
        asyncio.run(send(url, prompts_for(fixture, warm, "warm-up")))
        for cap in CAPS:
            name = case_name(cap, policy)
            say(f"variance: {name}")
            drawn = lengths(fixture, cap)
            asked = prompts_for(fixture, drawn[:first], name)
            rates = beside_simulation(
                url,
                policy,
                asked,
                partial(answered, fixture, url, asked, policy),
                lambda outcomes: {RATE: tokens_per_second(outcomes)},
                (RATE,),
            )
            found[name] = {SPREAD: statistics.pvariance(drawn), **rates}
    return found


def run(fixture: Fixture) -> Iterator[tuple[str, Figures]]:
    """Every policy at every cap."""
    for policy in POLICIES:
        yield from served(fixture, policy).items()


def conclude(table: Table) -> Sequence[str]:
    """Continuous over each other at each cap, the goal, and points that are simulated badly."""
    lines, best = [], 0.0
    for cap in CAPS:
        rates = {policy: table[case_name(cap, policy)][RATE].median for policy in POLICIES}
        times = [
            f"{rates[CONTINUOUS] / rate:.2f} times {policy}"
            for policy, rate in rates.items()
            if policy != CONTINUOUS
        ]
        lines.append(f"At most {cap} tokens: continuous gives {', '.join(times)}.")
        best = rates[CONTINUOUS] / rates[NAIVE]
    verdict = "met" if best >= GOAL else "missed"
    lines.append(
        f"Goal at the highest variance, {GOAL:.0f} times static-naive: {best:.2f}, {verdict}."
    )
    return [*lines, conclude_ratios(table, (RATE,))]


def chart(title: str, table: Table) -> str:
    """Throughput over the cap, a line for each policy."""

    def points(column: str) -> dict[str, list[tuple[float, float]]]:
        return {
            policy: [(cap, table[case_name(cap, policy)][column].median) for cap in CAPS]
            for policy in POLICIES
        }

    panel = Panel(
        title="Output tokens per second",
        points=points(RATE),
        simulated=points(simulated(RATE)),
        x_title="longest answer, tokens: the variance of lengths grows with it",
        doubles=True,
    )
    return curves(title, [panel])


EXPERIMENT = Experiment(
    name="variance",
    title="Throughput over the variance of output lengths",
    method=(
        f"Anyscale's shape is 1 000 prompts of 512 tokens at once. Here: {NUM_PROMPTS} prompts of"
        f" {PROMPT_TOKENS} tokens at once, batches of at most {BATCH_SIZE}, answers from an exponential"
        f" distribution of mean {MEAN_OUTPUT} tokens (at least 1) that is capped at each of the values; every"
        " cap cuts the same draws. Clients announce the exact length, which ends the answer, and get it in"
        f" one piece. `none` answers the first {NUM_ALONE} prompts, since its rate does not depend on their"
        " number. A static batch is formed of the requests that wait when"
        " the batch is empty, so these policies get a request before the prompts, and time counts from its"
        " end; for `continuous` it counts from the sending. The simulator has the costs that the server has"
        " learned before the run."
    ),
    cases=tuple(Case(case_name(cap, policy)) for cap in CAPS for policy in POLICIES),
    run=run,
    conclude=conclude,
    chart=chart,
)
