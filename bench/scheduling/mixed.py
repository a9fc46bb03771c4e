"""Short prompts beside a long one: time to first token of both, by the order in which prompts are computed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from statistics import median

from bench.parts.client import Answer, Client, Request, closed_loop, open_loop, succeeded
from bench.parts.fixture import Fixture
from bench.parts.outcome import Outcome
from bench.parts.part import Case, Figures, Part, Table
from bench.parts.simulation import deployment_of, simulate
from bench.parts.workloads import first_tokens, milliseconds, saturated_rate

NUM_STREAMS, STREAM_TOKENS = 8, 512
SHORT_TOKENS, LONG_TOKENS = 30, 7000
NUM_CLIENTS = 16
"""Clients of a closed loop that keeps the server busy with short prompts."""
POLL_SECONDS = 0.01
NUM_TRACED = 40
"""Short prompts of the load that is simulated too."""
PAUSE_SECONDS = 0.2
"""Mean pause between the short prompts that are sent alone."""

TARGET = "--target-inter-token-latency=50"
CASES = (
    Case("in order of arrival", ("--prefill-order=arrival",)),
    Case("shortest first", ("--prefill-order=shortest",)),
    Case("in order of arrival, target 50 ms", ("--prefill-order=arrival", TARGET)),
    Case("shortest first, target 50 ms", ("--prefill-order=shortest", TARGET)),
)
SHORT_ALONE, SHORT_BESIDE = "short without a long one, ms", "short beside a long one, ms"
LONG_ALONE, LONG_BESIDE = "long alone, ms", "long with one short, ms"
LONG_UNDER_LOAD = "long at 50 % load of short ones, ms"
SIMULATED_SHORT = "short, simulated over measured"
SIMULATED_LONG = "long, simulated over measured"
SHORT_UNDER_LOAD = "short ones of that load, p50, ms"


class Scene:
    """Requests of a repetition, each with a prompt of its own, and the streams that run all the time."""

    def __init__(self, fixture: Fixture, client: Client) -> None:
        self._texts = fixture.texts
        self._seed = fixture.seed("mixed")
        self._numbers = count()
        self.long_tokens = min(LONG_TOKENS, fixture.most_positions - STREAM_TOKENS)
        self._client = client
        self._streamed: list[Answer] = []

    def request(self, tokens: int, *, output_tokens: int = 1, due: float = 0.0) -> Request:
        """A request with a new prompt."""
        seed = f"{self._seed}/{next(self._numbers)}"
        prompt = self._texts.prompt(tokens, seed=seed)
        return Request(prompt=prompt, prompt_tokens=tokens, output_tokens=output_tokens, due=due)

    def long(self, *, due: float = 0.0) -> Request:
        """The long prompt."""
        return self.request(self.long_tokens, due=due)

    def shorts(self, moments: Sequence[float]) -> list[Request]:
        """A short prompt for each moment."""
        return [self.request(SHORT_TOKENS, due=due) for due in moments]

    async def send(self, request: Request) -> Answer:
        """Send a request now and wait for its answer."""
        answer = Answer(request, time.perf_counter())
        await self._client.send(answer)
        return answer

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[None]:
        """Keep `NUM_STREAMS` answers running for the length of the block."""
        tasks = [asyncio.create_task(self._stream()) for _ in range(NUM_STREAMS)]
        while not self._all_stream():  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        succeeded(self._streamed)

    def _all_stream(self) -> bool:
        begun = [answer for answer in self._streamed if answer.arrivals]
        return len(begun) >= NUM_STREAMS

    async def _stream(self) -> None:
        while True:
            request = self.request(SHORT_TOKENS, output_tokens=STREAM_TOKENS)
            self._streamed.append(Answer(request, time.perf_counter()))
            await self._client.send(self._streamed[-1])
            succeeded(self._streamed[-1:])


async def measure(url: str, fixture: Fixture) -> Figures:
    """Both kinds of prompts alone, together, and the long one at half load of short ones."""
    num_longs = fixture.sized(8, 1)
    generator = random.Random(fixture.seed("mixed, moments"))
    async with Client(url) as client:
        scene = Scene(fixture, client)
        async with scene.streams():
            shorts_alone = await _shorts_alone(scene, generator, fixture.sized(40, 4))
            longs_alone = [await scene.send(scene.long()) for _ in range(fixture.sized(3, 1))]
            seconds = longs_alone[0].first_token_seconds
            shorts, longs = [], []
            for _ in range(num_longs):
                moment = generator.uniform(0.1, 0.7) * seconds
                long, short = await open_loop(client, [scene.long(), *scene.shorts([moment])])
                longs.append(long)
                shorts.append(short)
            many = scene.shorts([0.0] * fixture.sized(640, 160))
            saturating = await closed_loop(client, many, num_clients=NUM_CLIENTS)
            rate = saturated_rate(saturating) / 2
            loads = [await _under_load(scene, generator, rate) for _ in range(fixture.sized(3, 1))]
        traced, predicted = await _traced(scene, client, url, generator)
    loaded, load = [each[0] for each in loads], [short for each in loads for short in each[1:]]
    succeeded([*shorts_alone, *longs_alone, *shorts, *longs, *saturating, *loaded, *load, *traced])
    return {
        SHORT_ALONE: milliseconds(first_tokens(shorts_alone), 0.5)[0],
        SHORT_BESIDE: milliseconds(first_tokens(shorts), 0.5)[0],
        "worst, ms": milliseconds(first_tokens(shorts), 1.0)[0],
        LONG_ALONE: milliseconds(first_tokens(longs_alone), 0.5)[0],
        LONG_BESIDE: milliseconds(first_tokens(longs), 0.5)[0],
        LONG_UNDER_LOAD: milliseconds(first_tokens(loaded), 0.5)[0],
        SHORT_UNDER_LOAD: milliseconds(first_tokens(load), 0.5)[0],
        "short ones a second": rate,
        SIMULATED_SHORT: _median(predicted, SHORT_TOKENS) / _median(traced, SHORT_TOKENS),
        SIMULATED_LONG: _median(predicted, scene.long_tokens) / _median(traced, scene.long_tokens),
    }


async def _shorts_alone(scene: Scene, generator: random.Random, number: int) -> list[Answer]:
    answers = []
    for _ in range(number):
        await asyncio.sleep(generator.expovariate(1 / PAUSE_SECONDS))
        answers.append(await scene.send(scene.shorts([0.0])[0]))
    return answers


async def _traced(
    scene: Scene, client: Client, url: str, generator: random.Random
) -> tuple[list[Answer], list[Outcome]]:
    """Streams, a long prompt and short ones at known times: measured, and simulated with the server's costs."""
    asked = [scene.request(SHORT_TOKENS, output_tokens=STREAM_TOKENS) for _ in range(NUM_STREAMS)]
    asked.append(scene.long(due=1.0))
    asked += scene.shorts([generator.uniform(0.5, 4.0) for _ in range(NUM_TRACED)])
    predicted = await asyncio.to_thread(lambda: simulate(deployment_of(url), asked))
    return await open_loop(client, asked), predicted


def _median(outcomes: Sequence[Answer] | Sequence[Outcome], num_tokens: int) -> float:
    """Median seconds to the first token of prompts of `num_tokens` tokens that want one token."""
    return median(
        outcome.first_token_seconds
        for outcome in outcomes
        if (outcome.request.prompt_tokens, outcome.request.output_tokens) == (num_tokens, 1)
    )


async def _under_load(scene: Scene, generator: random.Random, rate: float) -> list[Answer]:
    """A long prompt amid short ones that arrive at `rate` a second until its first token; the long one is the first."""
    long = asyncio.create_task(scene.send(scene.long()))
    shorts: list[asyncio.Task[Answer]] = []
    due = time.perf_counter()
    while not long.done():
        due += generator.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        shorts.append(asyncio.create_task(scene.send(scene.shorts([0.0])[0])))
    return [await long, *[await short for short in shorts]]


def run(fixture: Fixture, case: Case) -> Figures:
    with fixture.serving(*case.flags) as server:
        return asyncio.run(measure(server.url, fixture))


def conclude(table: Table) -> Sequence[str]:
    """The ratios that matter."""
    lines = []
    for name, row in table.items():
        short = row[SHORT_BESIDE].median / row[SHORT_ALONE].median
        load = row[LONG_UNDER_LOAD].median / row[LONG_ALONE].median
        lines.append(
            f"{name}: the short prompt's TTFT beside a long one is {short:.2f} times that without; half a load of"
            f" short ones makes the long one's {load:.2f} times."
        )
    for before, after in zip(CASES[::2], CASES[1::2], strict=True):
        ratio = table[after.name][LONG_BESIDE].median / table[before.name][LONG_BESIDE].median
        lines.append(f"The long prompt's TTFT, {after.name} over {before.name}: {ratio:.2f}.")
    return lines


PART = Part(
    name="mixed",
    title="Short prompts beside a long one",
    method=(
        f"{NUM_STREAMS} streams run all the time. Prompts of {SHORT_TOKENS} tokens come alone; a prompt of"
        f" {LONG_TOKENS} tokens comes alone, then with one short prompt at a random moment of its"
        " computation, then amid short ones that arrive by Poisson at half the rate of a closed loop of"
        f" {NUM_CLIENTS} clients that send them beside the streams. TTFT, medians. The last two columns"
        f" are of a load at known times: the streams, a long prompt after a second, and {NUM_TRACED} short ones."
    ),
    cases=CASES,
    run=run,
    conclude=conclude,
)
