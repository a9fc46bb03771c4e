"""Ten times as many clients as the server accepts, for minutes: accepted requests must get the right answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bench.faults.deployment import Deployment, deployed
from bench.faults.fixture import Fixture, Part, Report
from bench.faults.memory import MEGABYTE, Reading, read
from bench.faults.streams import Answer, Clients, mixed_bodies
from bench.harness.quiet import wait_until_quiet
from bench.harness.repeats import figure
from bench.harness.tables import markdown
from millrace.load.measurement import Quantiles

CAPACITY, TIMES, NUM_BODIES, LONGEST = 16, 10, 48, 120
NORMAL_SECONDS, OVERLOAD_SECONDS = 60.0, 180.0
RETRY_SECONDS = 0.25
"""The wait of a client after a 429, shorter than its `Retry-After`."""
READ_SECONDS = 1.0


@dataclass(slots=True)
class Phase:
    """A number of clients in a closed loop, for a time."""

    name: str
    num_clients: int
    seconds: float
    num_tokens: int = 0
    num_answers: int = 0
    first_tokens: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    """Seconds until each 429."""
    readings: list[Reading] = field(default_factory=list)
    """Readings of the router."""
    problems: list[str] = field(default_factory=list)

    def took(self, answer: Answer, expected: Answer) -> bool:
        """Count an answer; False for a refusal."""
        seconds = answer.ended - answer.sent
        if answer.status == 429:
            self.refusals.append(seconds)
            return False
        if answer.error:
            self.problems.append(f"{self.name}: {answer.error}")
        elif answer.outcome != expected.outcome:
            self.problems.append(f"{self.name}: an answer differs from the one without load")
        else:
            self.num_answers += 1
            self.num_tokens += len(answer.events)
            self.first_tokens.append(answer.arrivals[0] - answer.sent)
        return True

    def row(self) -> tuple[str, ...]:
        """Its figures."""
        first, refusals = Quantiles.of(self.first_tokens), Quantiles.of(self.refusals)
        sizes = [reading.resident / MEGABYTE for reading in self.readings]
        return (
            self.name,
            str(self.num_clients),
            str(self.num_answers),
            f"{self.num_tokens / self.seconds:.0f}",
            *(figure(x) for x in (first.p50, first.p90)),
            str(len(self.refusals)),
            *(figure(x) if self.refusals else "" for x in (refusals.p50, refusals.p99)),
            *(f"{size:.1f}" for size in (sizes[0], max(sizes), sizes[-1])),
        )


TITLES = (
    *("phase", "clients", "answers", "tokens/s", "TTFT p50, ms", "p90", "429", "until 429 p50, ms"),
    *("p99", "router MB first", "most", "last"),
)


async def _run(
    deployment: Deployment, phase: Phase, bodies: Sequence[Mapping[str, Any]], alone: list[Answer]
) -> None:
    numbers, start = count(), time.perf_counter()
    async with Clients(deployment.url) as clients:

        async def client() -> None:
            while time.perf_counter() < start + phase.seconds:
                place = next(numbers) % len(bodies)
                answer = Answer(bodies[place])
                await clients.send(answer)
                if not phase.took(answer, alone[place]):
                    await asyncio.sleep(RETRY_SECONDS)

        async def watch() -> None:
            while True:
                roles = {"router": deployment.by_role()["router"]}
                phase.readings += read(roles, start=start)
                await asyncio.sleep(READ_SECONDS)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client() for _ in range(phase.num_clients)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _alone(deployment: Deployment, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
    async with Clients(deployment.url) as clients:
        answers = []
        for body in bodies:
            answers += await clients.send_all([body])
            answers[-1].outcome  # noqa: B018 - raises where there is none to compare with
        return answers


def run(fixture: Fixture) -> Report:
    report, bodies = Report(), mixed_bodies(NUM_BODIES, longest=LONGEST)
    phases = [
        Phase("at capacity", CAPACITY, NORMAL_SECONDS * fixture.scale),
        Phase(f"{TIMES} times the capacity", TIMES * CAPACITY, OVERLOAD_SECONDS * fixture.scale),
        Phase("at capacity, after", CAPACITY, NORMAL_SECONDS * fixture.scale),
    ]
    wait_until_quiet(fixture.quiet)
    flags = ("--deterministic=on", f"--max-concurrent-requests={CAPACITY}", *fixture.flags)
    with deployed(fixture.model, *flags, log=fixture.log("overload")) as deployment:
        stop = report.watch(deployment.server)
        alone = asyncio.run(_alone(deployment, bodies))
        for phase in phases:
            asyncio.run(_run(deployment, phase, bodies, alone))
            report.problems += phase.problems
        stop()
    overload = phases[1]
    report.paragraphs = [
        f"`--max-concurrent-requests={CAPACITY}`; each client sends its next request after an answer, or"
        f" {RETRY_SECONDS} s after a 429. Every answer is compared with that of the same request alone."
        f" {overload.seconds / 60:g} minutes of overload.",
        markdown(TITLES, [phase.row() for phase in phases]),
    ]
    report.data = {phase.name: dict(zip(TITLES, phase.row(), strict=True)) for phase in phases}
    return report


PART = Part(name="overload", title="Ten times the capacity", run=run)
