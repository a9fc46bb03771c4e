"""The simulator against the server: the same requests, and costs learned from others like them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.parts.client import Answer, Client, Request, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part, Table
from bench.parts.workloads import (
    first_tokens,
    lognormal_lengths,
    milliseconds,
    poisson_seconds,
    saturated_rate,
    tokens_per_second,
    uniform_lengths,
)
from bench.scheduling.simulated import simulate

BATCH_SIZE = 32
TOLERANCE = 0.2
"""The allowed relative error of a simulated figure."""
COMPARED = ("tokens/s", "TTFT p50, ms", "TTFT p90, ms")
"""TTFT from the arrival at the router until it sends the first token, as in the simulator."""
AT_CLIENTS = ("TTFT p50 at clients, ms", "TTFT p90 at clients, ms")
LOG_SECONDS = 10.0
"""The longest delay of the server's request log after an answer."""

CASES = (
    Case("Poisson, 0.7 of what the server can do", amount=0.7),
    Case("Poisson, 1.3", amount=1.3),
    Case("all at once"),
)


def requests(fixture: Fixture, moments: Sequence[float], *, seed: str) -> list[Request]:
    """Requests of random lengths that clients announce."""
    count, most = len(moments), fixture.fitting(512)
    prompts = uniform_lengths(count, least=16, most=most // 2, seed=f"{seed}/prompts")
    lengths = lognormal_lengths(
        count, median=most / 10, sigma=0.8, most=most // 2, seed=f"{seed}/answers"
    )
    return [
        Request(
            prompt=fixture.texts.prompt(prompt, seed=f"{seed}/{number}"),
            prompt_tokens=prompt,
            output_tokens=length,
            due=due,
        )
        for number, (due, prompt, length) in enumerate(zip(moments, prompts, lengths, strict=True))
    ]


async def send(url: str, asked: Sequence[Request]) -> list[Answer]:
    """Send all requests when they are due."""
    async with Client(url) as client:
        return list(succeeded(await open_loop(client, asked)))


class LogLags(Exception):  # noqa: N818
    """The request log lacks answered requests."""


def logged_first_tokens(log: Path, *, after: int, count: int) -> list[float]:
    """Seconds to the first token of `count` requests, after the first `after`, from the log. Raises LogLags."""
    deadline = time.monotonic() + LOG_SECONDS
    while True:
        lines = [json.loads(line)["fields"] for line in log.read_bytes().split(b"\n")[:-1]]
        found = [line["time_to_first_token"] for line in lines if "time_to_first_token" in line]
        if len(found) >= after + count:
            return found[after : after + count]
        if time.monotonic() > deadline:
            raise LogLags(f"{log} tells of {len(found)} requests, not of {after + count}")
        time.sleep(0.1)


def compared(said: Mapping[str, float]) -> Mapping[str, float]:
    """The simulator's figures in the units of ours."""
    values = (said["tokens_per_second"], 1000 * said["ttft_p50"], 1000 * said["ttft_p90"])
    return dict(zip(COMPARED, values, strict=True))


def figures(
    answers: Sequence[Answer],
    at_router: Sequence[float],
    predicted: Mapping[str, float],
    *,
    hindsight: Mapping[str, float],
) -> Figures:
    """Measured and simulated figures and their ratio, also with the costs learned in the run itself."""
    p50, p90 = milliseconds(at_router, 0.5, 0.9)
    measured = dict(zip(COMPARED, (tokens_per_second(answers), p50, p90), strict=True))
    found = {}
    for title in COMPARED:
        found[title] = measured[title]
        found[f"simulated {title}"] = predicted[title]
        found[f"{title}: ratio"] = predicted[title] / measured[title]
        found[f"{title}: ratio in hindsight"] = hindsight[title] / measured[title]
    found |= zip(AT_CLIENTS, milliseconds(first_tokens(answers), 0.5, 0.9), strict=True)
    return found


def run(fixture: Fixture, case: Case) -> Figures:
    """Warm up, which teaches the capacity and the costs of steps; then simulate; then measure."""
    count, log = fixture.sized(200, 40), fixture.out / "requests.jsonl"
    log.unlink(missing_ok=True)
    with fixture.serving(f"--max-batch-size={BATCH_SIZE}", f"--log-requests={log}") as server:
        warm = requests(
            fixture,
            [0.0] * fixture.sized(6 * BATCH_SIZE, 3 * BATCH_SIZE),
            seed=fixture.seed("warm-up"),
        )
        rate = saturated_rate(asyncio.run(send(server.url, warm))) * case.amount
        num_before = len(warm)
        if rate:
            # A burst shows only the largest batch size.
            seed = fixture.seed(f"{case.name}, warm-up")
            moments = poisson_seconds(rate, count // 2, seed=seed)
            asyncio.run(send(server.url, requests(fixture, moments, seed=seed)))
            num_before += len(moments)
        seed = fixture.seed(case.name)
        moments = poisson_seconds(rate, count, seed=seed) if rate else [0.0] * count
        asked = requests(fixture, moments, seed=seed)
        said = simulate(server.url, asked, folder=fixture.out)
        answers = asyncio.run(send(server.url, asked))
        afterwards = simulate(server.url, asked, folder=fixture.out)
        at_router = logged_first_tokens(log, after=num_before, count=count)
    return figures(answers, at_router, compared(said), hindsight=compared(afterwards))


def conclude(table: Table) -> Sequence[str]:
    """The ratios out of bounds, if any."""
    out = [
        f"{name}, {title}: {row[f'{title}: ratio'].median:.2f}"
        for name, row in table.items()
        for title in COMPARED
        if abs(row[f"{title}: ratio"].median - 1) > TOLERANCE
    ]
    goal = f"{100 * TOLERANCE:.0f} %"
    return [f"Further off than {goal}: {'; '.join(out)}." if out else f"All within {goal}."]


PART = Part(
    name="simulator",
    title="The simulator against the server",
    method=(
        "Requests of 16 to 256 prompt tokens and lognormal answers (median 51, sigma 0.8). The server"
        " answers a warm-up of other requests of the same kind, at once and then at the same rate; then"
        " the simulator gets the trace of those to come and the server's `/info` with the costs it has"
        " learned, and only then the server gets the requests. Hindsight: the same with the costs that the"
        " server has learned by then, which a machine shared with others makes differ. TTFT is the router's, from"
        " the arrival of a request until its first token is sent; at clients HTTP and the client itself come on top."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
