"""What a guided row costs the rows beside it, and what guided rows cost themselves."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.guidance.workloads import requests
from bench.repeats import Sample
from bench.scheduling.client import Answer, Client, Request, succeeded
from bench.scheduling.lab import Lab
from bench.scheduling.part import Case, Figures, Question, Samples, Table, table_of
from bench.scheduling.workloads import gaps_within, milliseconds

NUM_ROWS = 32
SETTLED_TOKENS = 12
MEAN, MEDIAN, WORST = (f"between tokens, {which}, ms" for which in ("mean", "p50", "p99"))
RATE = "tokens/s"
BESIDE = (Case("31 plain, 1 plain", amount=0), Case("31 plain, 1 guided", amount=1))
GUIDED = (Case("32 plain", amount=0), Case("32 guided", amount=NUM_ROWS))
ROUNDS = 8


async def answers_of(url: str, made: Sequence[Request]) -> list[Answer]:
    """All at once, streamed."""
    async with Client(url) as client:
        answers = [Answer(request, time.perf_counter()) for request in made]
        await asyncio.gather(*(client.send(answer) for answer in answers))
    succeeded(answers)
    return answers


def gaps_beside(answers: Sequence[Answer]) -> list[float]:
    """Seconds between tokens of the rows that are plain in every case, while all rows run."""
    begin = max(answer.arrivals[SETTLED_TOKENS] for answer in answers)
    end = min(answer.arrivals[-1] for answer in answers)
    plain = answers[: NUM_ROWS - 1]
    return [gap for answer in plain for gap in gaps_within(answer.arrivals, begin, end)]


def beside(answers: Sequence[Answer]) -> Figures:
    """Time between tokens of the 31 plain rows while all 32 run."""
    gaps = gaps_beside(answers)
    p50, p99 = milliseconds(gaps, 0.5, 0.99)
    return {MEAN: 1000 * statistics.fmean(gaps), MEDIAN: p50, WORST: p99}


def rates(answers: Sequence[Answer]) -> Figures:
    """Tokens of all rows over the time from the first request to the last token."""
    seconds = max(a.arrivals[-1] for a in answers) - min(a.due for a in answers)
    gaps = [
        gap for a in answers for gap in gaps_within(a.arrivals, a.arrivals[SETTLED_TOKENS], a.ended)
    ]
    return {
        RATE: sum(a.num_tokens for a in answers) / seconds,
        MEDIAN: milliseconds(gaps, 0.5)[0],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn(Question):
    """Cases that share a server and take turns on it, since the machine's speed changes; `figures` of each round."""

    figures: Callable[[Sequence[Answer]], Figures]

    def measure(self, lab: Lab, *, repeats: int) -> Table:
        """Some rounds on each of so many servers; the first, in which the grammar is compiled, does not count.

        Raises ServerError or RequestsFailed.
        """
        samples: Samples = {case.name: {} for case in self.cases}
        for lab.repeat in range(repeats):
            lab.other_cores, taken = 0.0, []
            with lab.serving() as server:
                for number in range(1 + lab.sized(ROUNDS, 1)):
                    for case in self.cases if number % 2 else reversed(self.cases):
                        figures = self.figures(ask(lab, case, server.url, number))
                        taken += [(case.name, figures)] if number else []
            for name, figures in taken:
                for title, value in figures.items():
                    sample = Sample(value, lab.other_cores)
                    samples[name].setdefault(title, []).append(sample)
        return table_of(samples)


def ask(lab: Lab, case: Case, url: str, number: int) -> list[Answer]:
    """A round of all rows at once."""
    num_guided = int(case.amount)
    made = requests(
        lab, f"{case.name}/{number}", num_plain=NUM_ROWS - num_guided, num_guided=num_guided
    )
    return asyncio.run(answers_of(url, made))


def ratio(table: Table, cases: Sequence[Case], title: str) -> float:
    """Of the second case to the first, the median of all rounds."""
    first, second = (table[case.name][title].samples for case in cases)
    pairs = zip(first, second, strict=True)
    return statistics.median(theirs.value / ours.value for ours, theirs in pairs)


def conclude_beside(table: Table) -> Sequence[str]:
    mean, median, worst = (ratio(table, BESIDE, title) for title in (MEAN, MEDIAN, WORST))
    return [
        f"With one guided row the 31 others wait {mean:.2f} times as long between tokens in the mean, {median:.2f}"
        f" times in the median and {worst:.2f} times at p99: medians of the ratios of rounds side by side."
    ]


def conclude_rates(table: Table) -> Sequence[str]:
    yielded = ratio(table, GUIDED, RATE)
    return [
        f"32 guided rows yield {yielded:.2f} of the tokens/s of 32 plain ones (median of rounds side by side)."
    ]


COMPANY = InTurn(
    name="company",
    title="One guided row among 31 plain ones",
    method=(
        "32 greedy streams of 64 tokens in, 256 out; one of them has to be JSON of a schema of objects, strings,"
        " integers and enumerations, or none has. Time between tokens of the other 31 while all 32 run."
    ),
    cases=BESIDE,
    figures=beside,
    conclude=conclude_beside,
)
RATES = InTurn(
    name="rates",
    title="32 guided rows",
    method=(
        "32 greedy streams of 64 tokens in, 256 out, without a grammar and with the same schema for each."
        " The grammar is compiled before what is measured."
    ),
    cases=GUIDED,
    figures=rates,
    conclude=conclude_rates,
)
