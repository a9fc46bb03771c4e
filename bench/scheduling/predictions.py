"""Predicted against measured time in the queue and to the first token."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from bench.harness.scrape import Samples, scrape
from bench.parts.client import Answer, Client, Request, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part
from bench.parts.workloads import (
    first_tokens,
    lognormal_lengths,
    milliseconds,
    poisson_seconds,
    saturated_rate,
    uniform_lengths,
)

BATCH_SIZE = 16
SERIES = 'millrace_prediction_error_seconds{{prediction="{}",percentile="{}"}}'

CASES = (
    Case("0.7 of what the server can do", amount=0.7),
    Case("1.0", amount=1.0),
    Case("1.3", amount=1.3),
)


def requests(fixture: Fixture, moments: Sequence[float], *, seed: str) -> list[Request]:
    """Requests of random lengths. Every other one announces its length and gets a whole answer; the rest disconnect."""
    count, most = len(moments), fixture.fitting(512)
    prompts = uniform_lengths(count, least=16, most=most // 2, seed=f"{seed}/prompts")
    answers = lognormal_lengths(
        count, median=most / 10, sigma=0.8, most=most // 2, seed=f"{seed}/answers"
    )
    return [
        Request(
            prompt=fixture.texts.prompt(prompt, seed=f"{seed}/{number}"),
            prompt_tokens=prompt,
            output_tokens=answer,
            due=due,
            says_length=number % 2 == 0,
            streams=number % 2 == 1,
        )
        for number, (due, prompt, answer) in enumerate(zip(moments, prompts, answers, strict=True))
    ]


async def measure(
    fixture: Fixture, url: str, moments: Sequence[float]
) -> tuple[list[Answer], Samples]:
    """Send requests at these times; returns the answers and the final metrics."""
    async with Client(url) as client:
        asked = requests(fixture, moments, seed=fixture.seed("predictions"))
        answers = await open_loop(client, asked)
        return list(succeeded(answers)), await scrape(client)


def queue_seconds(headers: Mapping[str, str]) -> tuple[float, float] | None:
    """Predicted and measured time in the queue, from a whole answer; None without a prediction."""
    predicted = headers.get("x-predicted-queue-time")
    if predicted is None:
        return None
    return int(predicted) / 1000, int(headers["x-queue-time"]) / 1000


def figures(answers: Sequence[Answer], metrics: Samples) -> Figures:
    """Quantiles of times and of absolute errors."""
    whole = [answer for answer in answers if not answer.request.streams]
    times = [pair for answer in whole if (pair := queue_seconds(answer.headers)) is not None]
    waited = milliseconds([realised for _, realised in times], 0.5, 0.9)
    missed = milliseconds([abs(predicted - realised) for predicted, realised in times], 0.5, 0.9)
    first = milliseconds(first_tokens(answers), 0.5, 0.9)
    late = [1000 * metrics.get(SERIES.format("first_token", q), 0.0) for q in ("50", "90")]
    titles = ("queue", "queue error", "TTFT", "TTFT error")
    found = {}
    for title, values in zip(titles, (waited, missed, first, late), strict=True):
        found[f"{title} p50, ms"], found[f"{title} p90, ms"] = values
    return found


def run(fixture: Fixture, case: Case) -> Figures:
    """Measure the capacity on a separate server, so that the measured server is fresh."""
    flags = (f"--max-batch-size={BATCH_SIZE}",)
    count = fixture.sized(200, 40)
    with fixture.serving(*flags) as server:
        burst, _ = asyncio.run(
            measure(fixture, server.url, [0.0] * fixture.sized(8 * BATCH_SIZE, 4 * BATCH_SIZE))
        )
    rate = case.amount * saturated_rate(burst)
    moments = poisson_seconds(rate, count, seed=fixture.seed(case.name))
    with fixture.serving(*flags) as server:
        return figures(*asyncio.run(measure(fixture, server.url, moments)))


PART = Part(
    name="predictions",
    title="Accuracy of predictions",
    method=(
        "Requests of 16 to 256 prompt tokens and lognormal answers (median 51, sigma 0.8) arrive as a"
        f" Poisson process at a share of what the server can do in a batch of {BATCH_SIZE}. Half of them"
        " announce their length and are answered in one piece, half omit `max_new_tokens` and hang up."
        " Absolute errors, beside the times predicted: of the queue from the headers of the former, of"
        " the first token from the server's metrics over all."
    ),
    cases=CASES,
    run=run,
)
