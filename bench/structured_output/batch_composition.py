"""The cost of a row with a grammar to the rows beside it, and of such rows to themselves."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.harness.repeats import Sample
from bench.parts.client import Answer, Client, Request, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Question, Samples, Table, table_of
from bench.parts.workloads import gaps_within, milliseconds
from bench.structured_output.workloads import request, requests
from millrace.load.measurement import quantile

NUM_ROWS = 32
SETTLED_TOKENS = 12
COMPANION_TOKENS = 48
MEAN, WORST = (f"between tokens, {which}, ms" for which in ("mean", "p99"))
MEDIAN = "between tokens, p50, ms"
RATE = "tokens/s"
BESIDE_CASES = (
    Case("31 plain, 1 plain", amount=0),
    Case("31 plain, 1 with a grammar", amount=1),
    Case("31 plain, 1 plain again", amount=0),
)
GUIDED = (Case("32 plain", amount=0), Case("32 with a grammar", amount=NUM_ROWS))
ROUNDS = 8

Turn = Mapping[str, Figures]
"""Figures of each case, measured one right after the other."""


async def answers_of(url: str, made: Sequence[Request]) -> list[Answer]:
    """Stream all requests at once."""
    async with Client(url) as client:
        answers = [Answer(request, time.perf_counter()) for request in made]
        await asyncio.gather(*(client.send(answer) for answer in answers))
    succeeded(answers)
    return answers


async def turns_of(fixture: Fixture, url: str, number: int) -> list[Turn]:
    """One round: the figures of the 31 rows beside each companion, for turns during which all of them ran."""
    longest = fixture.fitting(fixture.sized(768, 400))
    others = [
        Answer(
            request(fixture, f"{number}/{row}", output_tokens=longest, has_grammar=False),
            time.perf_counter(),
        )
        for row in range(NUM_ROWS - 1)
    ]
    turns: list[dict[str, Answer]] = []
    async with Client(url) as client:
        streams = asyncio.gather(*(client.send(other) for other in others))
        while not any(other.ended for other in others):
            turns.append({})
            # In another order each time, so that no case always follows the same one.
            place = len(turns) % len(BESIDE_CASES)
            for case in BESIDE_CASES[place:] + BESIDE_CASES[:place]:
                made = request(
                    fixture,
                    f"{number}/{len(turns)}/{case.name}",
                    output_tokens=COMPANION_TOKENS,
                    has_grammar=case.amount > 0,
                )
                companion = turns[-1][case.name] = Answer(made, time.perf_counter())
                await client.send(companion)
        await streams
    succeeded([*others, *(companion for turn in turns for companion in turn.values())])
    return measured(others, turns)


def measured(others: Sequence[Answer], turns: Sequence[Mapping[str, Answer]]) -> list[Turn]:
    """Figures of the turns during which all of `others` ran."""
    begin = max(other.arrivals[SETTLED_TOKENS] for other in others)
    end = min(other.arrivals[-1] for other in others)
    return [
        {name: beside(others, companion) for name, companion in turn.items()}
        for turn in turns
        if all(
            begin <= companion.arrivals[0] and companion.arrivals[-1] <= end
            for companion in turn.values()
        )
    ]


def beside(others: Sequence[Answer], companion: Answer) -> Figures:
    """Time between the others' tokens while `companion` ran, its prompt aside."""
    # The others' tokens of its last step may arrive before its own; tokens of the next step are not beside it.
    begin, end = companion.arrivals[SETTLED_TOKENS], companion.arrivals[-2]
    gaps = [gap for other in others for gap in gaps_within(other.arrivals, begin, end)]
    return {MEAN: 1000 * statistics.fmean(gaps), WORST: milliseconds(gaps, 0.99)[0]}


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


def rounds_of_all(fixture: Fixture, url: str, number: int) -> list[Turn]:
    """32 rows of each case, all at once; in another order each time, because the machine's speed changes."""
    turn = {}
    for case in GUIDED if number % 2 else reversed(GUIDED):
        num_with_grammar = int(case.amount)
        made = requests(
            fixture,
            f"{case.name}/{number}",
            num_plain=NUM_ROWS - num_with_grammar,
            num_with_grammar=num_with_grammar,
        )
        turn[case.name] = rates(asyncio.run(answers_of(url, made)))
    return [turn]


def rounds_of_one(fixture: Fixture, url: str, number: int) -> list[Turn]:
    """31 rows, and the companions beside them one after the other."""
    return asyncio.run(turns_of(fixture, url, number))


@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn(Question):
    """Cases that share a server and take turns on it."""

    turns: Callable[[Fixture, str, int], Sequence[Turn]]
    """Returns the turns of a round, by its number, on the server at a URL."""

    def measure(self, fixture: Fixture, *, repeats: int) -> Table:
        """Some rounds on each of `repeats` servers; the first one, which compiles the grammar, does not count.

        Raises ServerError or RequestsFailed.
        """
        samples: Samples = {case.name: {} for case in self.cases}
        for fixture.repeat in range(repeats):
            taken: list[Turn] = []
            fixture.other_cores = 0.0
            with fixture.serving() as server:
                for number in range(1 + fixture.sized(ROUNDS, 1)):
                    turns = self.turns(fixture, server.url, number)
                    taken += turns if number else []
            for turn in taken:
                for name, figures in turn.items():
                    for title, value in figures.items():
                        sample = Sample(value, fixture.other_cores)
                        samples[name].setdefault(title, []).append(sample)
        return table_of(samples)


def ratios(table: Table, cases: Sequence[Case], title: str) -> list[float]:
    """Ratios of the second case to the first within each turn, in ascending order."""
    first, second = (table[case.name][title].samples for case in cases)
    pairs = zip(first, second, strict=True)
    return sorted(theirs.value / ours.value for ours, theirs in pairs)


def conclude_beside(table: Table) -> Sequence[str]:
    plain, with_grammar, again = BESIDE_CASES
    lines = []
    for name, case in (("a row with a grammar", with_grammar), ("another plain one", again)):
        found = ratios(table, (plain, case), MEAN)
        worst = statistics.median(ratios(table, (plain, case), WORST))
        lines.append(
            f"With {name} in place of the plain one the 31 others wait {statistics.median(found):.3f} times as long"
            f" between tokens in the mean (quartiles {quantile(found, 0.25):.3f} to {quantile(found, 0.75):.3f} of"
            f" {len(found)} turns), and {worst:.2f} times at p99: medians of the ratios within a turn."
        )
    return lines


def conclude_rates(table: Table) -> Sequence[str]:
    yielded = statistics.median(ratios(table, GUIDED, RATE))
    return [
        f"32 rows with a grammar yield {yielded:.2f} of the tokens/s of 32 plain ones (median of rounds side by side)."
    ]


BESIDE = InTurn(
    name="beside",
    title="One row with a grammar among 31 without",
    method=(
        "31 greedy streams of 64 tokens in, 768 out. Beside them run, one after the other, answers of"
        f" {COMPANION_TOKENS} tokens: a plain one, one that must be JSON of a schema of objects, strings, integers"
        " and enumerations, and another plain one, as a control. Time between tokens of the 31 while each"
        " of these decodes."
    ),
    cases=BESIDE_CASES,
    turns=rounds_of_one,
    conclude=conclude_beside,
)
RATES = InTurn(
    name="rates",
    title="32 rows with a grammar",
    method=(
        "32 greedy streams of 64 tokens in, 256 out, without a grammar and with the same schema for each."
        " The grammar is compiled before the measurement."
    ),
    cases=GUIDED,
    turns=rounds_of_all,
    conclude=conclude_rates,
)
