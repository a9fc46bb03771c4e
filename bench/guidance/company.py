"""What a guided row costs the rows beside it, and what guided rows cost themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from bench.guidance.workloads import requests
from bench.scheduling.client import Answer, Client, Request, succeeded
from bench.scheduling.lab import Lab
from bench.scheduling.part import Case, Figures, Part, Table
from bench.scheduling.workloads import gaps_within, milliseconds

NUM_ROWS = 32
SETTLED_TOKENS = 12
WORST, MEDIAN = "between tokens, p99, ms", "between tokens, p50, ms"
RATE = "tokens/s"
BESIDE = (Case("31 plain, 1 plain", amount=0), Case("31 plain, 1 guided", amount=1))
GUIDED = (Case("32 plain", amount=0), Case("32 guided", amount=NUM_ROWS))
ROUNDS = 3


async def answers_of(url: str, made: Sequence[Request]) -> list[Answer]:
    """All at once, streamed."""
    async with Client(url) as client:
        answers = [Answer(request, time.perf_counter()) for request in made]
        await asyncio.gather(*(client.send(answer) for answer in answers))
    succeeded(answers)
    return answers


def measure(lab: Lab, case: Case) -> list[Answer]:
    """Some rounds of all rows on one server; the first, in which the grammar is compiled, does not count."""
    num_guided = int(case.amount)
    taken: list[Answer] = []
    with lab.serving(*case.flags) as server:
        for number in range(1 + lab.sized(ROUNDS, 1)):
            made = requests(
                lab, f"{case.name}/{number}", num_plain=NUM_ROWS - num_guided, num_guided=num_guided
            )
            answers = asyncio.run(answers_of(server.url, made))
            taken += answers if number else []
    return taken


def beside(lab: Lab, case: Case) -> Figures:
    """Time between tokens of the 31 plain rows while all 32 run."""
    answers = measure(lab, case)
    gaps: list[float] = []
    for start in range(0, len(answers), NUM_ROWS):
        group = answers[start : start + NUM_ROWS]
        begin = max(answer.arrivals[SETTLED_TOKENS] for answer in group)
        end = min(answer.arrivals[-1] for answer in group)
        for answer in group[: NUM_ROWS - 1]:
            gaps += gaps_within(answer.arrivals, begin, end)
    p50, p99 = milliseconds(gaps, 0.5, 0.99)
    return {MEDIAN: p50, WORST: p99}


def rates(lab: Lab, case: Case) -> Figures:
    """Tokens of all rows over the time from the first request to the last token, rounds added."""
    answers = measure(lab, case)
    seconds, tokens = 0.0, 0
    for start in range(0, len(answers), NUM_ROWS):
        group = answers[start : start + NUM_ROWS]
        seconds += max(a.arrivals[-1] for a in group) - min(a.due for a in group)
        tokens += sum(a.num_tokens for a in group)
    gaps = [
        gap for a in answers for gap in gaps_within(a.arrivals, a.arrivals[SETTLED_TOKENS], a.ended)
    ]
    return {RATE: tokens / seconds, MEDIAN: milliseconds(gaps, 0.5)[0]}


def conclude_beside(table: Table) -> Sequence[str]:
    none, one = (table[case.name] for case in BESIDE)
    return [
        f"With one guided row the 31 others wait {one[MEDIAN].median / none[MEDIAN].median:.2f} times as long"
        f" between tokens in the median and {one[WORST].median / none[WORST].median:.2f} times as long at p99."
    ]


def conclude_rates(table: Table) -> Sequence[str]:
    plain, guided = (table[case.name][RATE].median for case in GUIDED)
    return [f"32 guided rows yield {guided / plain:.2f} of the tokens/s of 32 plain ones."]


COMPANY = Part(
    name="company",
    title="One guided row among 31 plain ones",
    method=(
        "32 greedy streams of 64 tokens in, 256 out; one of them has to be JSON of a schema of objects, strings,"
        " integers and enumerations, or none has. Time between tokens of the other 31 while all 32 run."
    ),
    cases=BESIDE,
    run=beside,
    conclude=conclude_beside,
)
RATES = Part(
    name="rates",
    title="32 guided rows",
    method=(
        "32 greedy streams of 64 tokens in, 256 out, without a grammar and with the same schema for each."
        " The grammar is compiled before what is measured."
    ),
    cases=GUIDED,
    run=rates,
    conclude=conclude_rates,
)
