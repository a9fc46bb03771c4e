"""The savings of the prefix cache for many requests behind one long system prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bench.harness.scrape import grown, scrape
from bench.parts.client import Client, Request, closed_loop, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part, Table
from bench.parts.workloads import first_tokens, milliseconds, tokens_per_second

SYSTEM_TOKENS, OWN_TOKENS, NEW_TOKENS = 1000, 30, 16
GOAL = 0.9
"""Goal: the share of prompt tokens that are not computed."""
COMPUTED = "prompt tokens computed"

ON, OFF = ("--prefix-caching=on",), ("--prefix-caching=off",)
CASES = (
    Case("all at once, cache on", ON),
    Case("all at once, cache off", OFF),
    Case("8 clients, cache on", ON, 8),
    Case("8 clients, cache off", OFF, 8),
)


def requests(fixture: Fixture) -> list[Request]:
    """Prompts that share only their beginning."""
    seed = fixture.seed("system prompt")
    system = fixture.texts.prompt(fixture.fitting(SYSTEM_TOKENS), seed=seed)
    num_tokens = fixture.texts.count([system]) + OWN_TOKENS
    return [
        Request(
            prompt=fixture.texts.prompt(num_tokens, seed=f"{seed}/{number}", after=system),
            prompt_tokens=num_tokens,
            output_tokens=NEW_TOKENS,
        )
        for number in range(fixture.sized(64, 16))
    ]


async def measure(url: str, asked: Sequence[Request], num_clients: int) -> Figures:
    """Send the requests all at once, or by a number of clients."""
    async with Client(url) as client:
        before = await scrape(client)
        if num_clients:
            answers = await closed_loop(client, asked, num_clients=num_clients)
        else:
            answers = await open_loop(client, asked)
        after = await scrape(client)
    p50, p90 = milliseconds(first_tokens(succeeded(answers)), 0.5, 0.9)
    return {
        "prompt tokens": sum(request.prompt_tokens for request in asked),
        COMPUTED: grown(before, after, "millrace_prefill_tokens_total"),
        "found in the cache": grown(before, after, "millrace_prefix_cache_hit_tokens_total"),
        "TTFT p50, ms": p50,
        "TTFT p90, ms": p90,
        "tokens/s": tokens_per_second(answers),
    }


def run(fixture: Fixture, case: Case) -> Figures:
    with fixture.serving(*case.flags) as server:
        return asyncio.run(measure(server.url, requests(fixture), int(case.amount)))


def conclude(table: Table) -> Sequence[str]:
    """The reduction of computed tokens and of TTFT."""
    lines = []
    for on, off in ((CASES[0].name, CASES[1].name), (CASES[2].name, CASES[3].name)):
        saved = 1 - table[on][COMPUTED].median / table[off][COMPUTED].median
        sooner = table[off]["TTFT p50, ms"].median / table[on]["TTFT p50, ms"].median
        verdict = "met" if saved >= GOAL else "missed"
        lines.append(
            f"{on.removesuffix(', cache on')}: {100 * saved:.1f} % fewer prompt tokens computed (goal"
            f" {100 * GOAL:.0f} %, {verdict}), median TTFT {sooner:.1f} times shorter."
        )
    return lines


PART = Part(
    name="prefix",
    title="Prefix cache",
    method=(
        "Requests of one system prompt (1 000 tokens, or three quarters of a smaller model's positions)"
        " and 30 tokens of their own each, 16 new tokens; a server of its own for each row. Tokens are"
        " counted by the router."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
