"""A saturating load for an hour with a kill every few minutes: memory and latencies over time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from hashlib import sha256
from itertools import count, pairwise
from typing import Any

import orjson

from bench.faults.deployment import Deployment, NoShard, deployed
from bench.faults.fixture import Fixture, Part, Report
from bench.faults.kills.recovery import recovery_series
from bench.faults.memory import MEGABYTE, Reading, megabytes_per_hour, read
from bench.faults.streams import Answer, Clients, mixed_bodies
from bench.faults.windows import Windows, drift
from bench.harness.quiet import wait_until_quiet
from bench.harness.repeats import figure
from bench.harness.tables import markdown
from millrace.charts.lines import Panel, curves

NUM_CLIENTS, NUM_BODIES, LONGEST = 64, 96, 200
READ_SECONDS, WRITE_SECONDS, WINDOW_SECONDS = 10.0, 60.0, 300.0
WARM_UP_SECONDS = 600.0
"""Time before the readings that count for slopes; at most a sixth of the soak."""
SETTLE_SECONDS = 60.0
"""The same for the start of each process."""
MOST_KILL_SECONDS = 240.0
"""The longest time between two kills; the shortest is half of it."""
GAPS_OF_EVERY = 8
"""One in this many answers counts for the time between tokens."""


class Soak:
    """The state and the tasks of a soak."""

    def __init__(self, fixture: Fixture, deployment: Deployment) -> None:
        self._fixture = fixture
        self._deployment = deployment
        self._bodies = mixed_bodies(NUM_BODIES, longest=LONGEST)
        self._numbers = count()
        self._digests: dict[int, bytes] = {}
        self._start = time.perf_counter()
        self._end = self._start + fixture.minutes * 60
        self.windows = Windows(min(WINDOW_SECONDS, fixture.minutes * 10))
        self.readings: list[Reading] = []
        self.kills: list[float] = []
        self.problems: list[str] = []

    async def run(self) -> str:
        """Run until the end and the last answer; returns the server's metrics."""
        async with Clients(self._deployment.url) as clients:
            beside = [
                asyncio.create_task(self._every(READ_SECONDS, self._read)),
                asyncio.create_task(self._every(WRITE_SECONDS, self._write)),
                asyncio.create_task(self._kill()),
            ]
            try:
                await asyncio.gather(*(self._client(clients) for _ in range(NUM_CLIENTS)))
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                await self._write()
            return await clients.text("/metrics")

    async def _client(self, clients: Clients) -> None:
        while time.perf_counter() < self._end:
            number = next(self._numbers)
            answer = Answer(self._bodies[number % NUM_BODIES])
            await clients.send(answer)
            self.answered(number, answer)
            if answer.error:
                await asyncio.sleep(1.0)

    def answered(self, number: int, answer: Answer) -> None:
        """Count an answer, which must equal the first one to the same body."""
        if answer.error:
            self.problems.append(f"request {number}: {answer.error}")
            return
        digest = sha256(orjson.dumps([event.decode() for event in answer.outcome[0]])).digest()
        if self._digests.setdefault(number % NUM_BODIES, digest) != digest:
            self.problems.append(f"request {number}: another answer than the first time")
        window = self.windows.at(answer.ended - self._start)
        window.num_answers += 1
        window.num_tokens += len(answer.arrivals)
        window.first_tokens.append(answer.arrivals[0] - answer.sent)
        if number % GAPS_OF_EVERY == 0:
            window.between_tokens.extend(b - a for a, b in pairwise(answer.arrivals))

    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await act()
            await asyncio.sleep(seconds)

    async def _read(self) -> None:
        roles = await asyncio.to_thread(self._deployment.by_role)
        self.readings += read(roles, start=self._start)

    async def _kill(self) -> None:
        draw = random.Random(self._fixture.seed)
        most = min(MOST_KILL_SECONDS, self._fixture.minutes * 20)
        while True:
            await asyncio.sleep(most * (1 + draw.random()) / 2)
            with contextlib.suppress(NoShard):
                at, _ = await asyncio.to_thread(self._deployment.send_signal, 0, signal.SIGKILL)
                self.kills.append(at - self._start)
                self.windows.at(self.kills[-1]).num_kills += 1

    async def _write(self) -> None:
        self._fixture.write("soak", self.as_json())
        (self._fixture.out / "faults-soak.svg").write_text(self.chart())

    def slopes(self) -> dict[str, float | None]:
        """MB an hour by role."""
        after = min(WARM_UP_SECONDS, self._fixture.minutes * 10)
        return {
            role: megabytes_per_hour(
                [one for one in self.readings if one.role == role],
                after=after,
                settle=min(SETTLE_SECONDS, self._fixture.minutes),
            )
            for role in self.roles()
        }

    def roles(self) -> list[str]:
        """Launcher, router and shards."""
        return sorted({reading.role for reading in self.readings})

    def as_json(self) -> dict[str, Any]:
        """Plain containers, also before the end."""
        return {
            "minutes": (time.perf_counter() - self._start) / 60,
            "slopes_mb_per_hour": self.slopes(),
            "windows": self.windows.rows(),
            "kills": self.kills,
            "problems": self.problems[:100],
            "num_problems": len(self.problems),
            "readings": [asdict(reading) for reading in self.readings],
        }

    def chart(self) -> str:
        """Memory and latencies over time, as SVG."""
        memory = {
            role: [(r.at / 60, r.resident / MEGABYTE) for r in self.readings if r.role == role]
            for role in self.roles()
        }
        rows = self.windows.rows()
        titles = [title for _, row in rows[:1] for title in row if title.endswith("ms")]
        panels = [Panel(title="resident memory, MB", points=memory, x_title="minutes")]
        for kind in ("TTFT", "between tokens"):
            points = {
                title.removeprefix(f"{kind} ").removesuffix(", ms"): [
                    (minute, row[title]) for minute, row in rows
                ]
                for title in titles
                if title.startswith(kind)
            }
            panels.append(Panel(title=f"{kind}, ms", points=points, x_title="minutes"))
        return curves("Soak at saturation with kills", panels)


def run(fixture: Fixture) -> Report:
    report = Report()
    wait_until_quiet(fixture.quiet)
    flags = ("--deterministic=on", f"--max-concurrent-requests={NUM_CLIENTS * 2}", *fixture.flags)
    with deployed(fixture.model, *flags, log=fixture.log("soak")) as deployment:
        stop = report.watch(deployment.server)
        soak = Soak(fixture, deployment)
        metrics = asyncio.run(soak.run())
        stop()
    report.problems += soak.problems
    report.data = soak.as_json() | {"metrics": recovery_series(metrics)}
    report.paragraphs += [_paragraph(soak, fixture), memory_table(soak), window_table(soak)]
    return report


def _paragraph(soak: Soak, fixture: Fixture) -> str:
    rows = [row for _, row in soak.windows.rows()]
    answers, tokens = (int(sum(row[title] for row in rows)) for title in ("answers", "tokens"))
    drifts = {
        title: drift(rows, title)
        for title in (
            "TTFT p50, ms",
            "TTFT p90, ms",
            "between tokens p50, ms",
            "between tokens p90, ms",
        )
    }
    shown = ", ".join(f"{title.removesuffix(', ms')} {x:.2f}" for title, x in drifts.items() if x)
    return (
        f"{fixture.minutes:.0f} minutes, {NUM_CLIENTS} clients in a closed loop, {answers} answers, {tokens} tokens,"
        f" {len(soak.kills)} kills; {len(soak.problems)} answers failed or differed from the first"
        f" one to the same request. Latencies of the last third of the windows over the first third: {shown}."
    )


def memory_table(soak: Soak) -> str:
    """Memory of each role, and its slope."""
    slopes = soak.slopes()
    rows = []
    for role in soak.roles():
        own = [reading for reading in soak.readings if reading.role == role]
        slope = slopes[role]
        rows.append(
            (
                role,
                str(len({reading.pid for reading in own})),
                *(figure(one.resident / MEGABYTE) for one in (own[0], own[-1])),
                figure(max(one.resident for one in own) / MEGABYTE),
                "" if slope is None else f"{slope:+.2f}",
                *(str(one.num_fds) for one in (own[0], own[-1])),
            )
        )
    titles = ("process", "lives", "MB first", "last", "most", "MB an hour", "fds first", "last")
    return markdown(titles, rows)


def window_table(soak: Soak) -> str:
    """Latencies by window."""
    rows = soak.windows.rows()
    titles = list(rows[0][1]) if rows else []
    return markdown(
        ("from minute", *titles),
        [
            (
                f"{at:.0f}",
                *(
                    f"{row[title]:.0f}" if row[title] >= 100 else figure(row[title])
                    for title in titles
                ),
            )
            for at, row in rows
        ],
    )


PART = Part(name="soak", title="Soak at saturation with kills", run=run)
