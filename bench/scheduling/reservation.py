"""Growing KV against TGI's full reservation, for clients that do not announce the length of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.harness.scrape import Samples, grown, mean_above_zero, sampling, scrape
from bench.parts.client import Answer, Client, Request, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part, Table
from bench.parts.workloads import (
    first_tokens,
    lognormal_lengths,
    milliseconds,
    tokens_per_second,
)
from bench.scheduling.simulated import simulate

PROMPT_TOKENS, MEDIAN_ANSWER, LONGEST_ANSWER, SIGMA = 64, 96, 1024, 1.1
MOST_TOKENS = 2048
"""`--max-total-tokens`: the limit of a request without `max_new_tokens`."""
CAPACITY = 4
"""KV capacity, in requests of that length."""
SAMPLE_SECONDS = 0.25
RATE, BATCH = "tokens/s", "batch size"

CASES = (
    Case("full reservation", ("--kv-reservation=full",)),
    Case("growing", ("--kv-reservation=grow",)),
)


def requests(fixture: Fixture) -> list[Request]:
    """Requests that are all due at once, with heavy-tailed answers of unannounced length."""
    seed = fixture.seed("reservation")
    most = min(LONGEST_ANSWER, fixture.fitting(MOST_TOKENS) - PROMPT_TOKENS)
    lengths = lognormal_lengths(
        fixture.sized(192, 32), median=MEDIAN_ANSWER, sigma=SIGMA, most=most, seed=seed
    )
    return [
        Request(
            prompt=fixture.texts.prompt(PROMPT_TOKENS, seed=f"{seed}/{number}"),
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=length,
            says_length=False,
        )
        for number, length in enumerate(lengths)
    ]


async def measure(url: str, asked: Sequence[Request]) -> Figures:
    """Send everything, sample the batch size, wait for all."""
    async with Client(url) as client:
        before = await scrape(client)
        async with sampling(client, every=SAMPLE_SECONDS) as samples:
            answers = await open_loop(client, asked)
        after = await scrape(client)
    return figures(succeeded(answers), samples, before=before, after=after)


def figures(
    answers: Sequence[Answer], samples: Sequence[Samples], *, before: Samples, after: Samples
) -> Figures:
    """Figures of the clients, and the router's batch size."""
    p50, p90 = milliseconds(first_tokens(answers), 0.5, 0.9)
    batch = mean_above_zero(samples, "tgi_batch_current_size")
    return {
        BATCH: batch,
        RATE: tokens_per_second(answers),
        "TTFT p50, ms": p50,
        "TTFT p90, ms": p90,
        "preemptions": grown(before, after, "millrace_preemptions_total"),
    }


def run(fixture: Fixture, case: Case) -> Figures:
    most, asked = fixture.fitting(MOST_TOKENS), requests(fixture)
    limits = (f"--max-total-tokens={most}", f"--max-batch-total-tokens={CAPACITY * most}")
    with fixture.serving(*limits, *case.flags) as server:
        found = dict(asyncio.run(measure(server.url, asked)))
        predicted = simulate(server.url, asked, folder=fixture.out)
    return found | {
        "simulated batch size": predicted["batch_size"],
        "simulated tokens/s": predicted["tokens_per_second"],
        "simulated preemptions": predicted["preemptions"],
    }


def conclude(table: Table) -> Sequence[str]:
    """Growing over full reservation, measured and simulated."""
    full, grow = (table[case.name] for case in CASES)
    lines = []
    for title in (BATCH, RATE):
        measured = grow[title].median / full[title].median
        predicted = grow[f"simulated {title}"].median / full[f"simulated {title}"].median
        lines.append(
            f"{title}: growing gives {measured:.2f} times that of full reservation; the simulator says {predicted:.2f}."
        )
    return lines


PART = Part(
    name="reservation",
    title="Growing KV against full reservation",
    method=(
        "Requests of 64 prompt tokens, all due at once, with answers of lognormal length (median 96,"
        " sigma 1.1, at most 1 024). A request may grow to 2 048 tokens, and the KV cache has room for four"
        " such. Clients omit `max_new_tokens`."
        " Weights are random and no model ends an answer by itself, so each client hangs up after the"
        " last token it wants, and the router learns of it from the closed connection; the few tokens"
        " computed meanwhile are not counted. Batch size: mean while anything runs. The simulator runs"
        " the same trace with the costs that the server has learned."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
