"""Kill or stop shards while streams run, and compare every stream with an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.faults.deployment import Deployment, deployed
from bench.faults.fixture import Fixture, Part, Report
from bench.faults.kills.recovery import PARTS, recovery_series
from bench.faults.kills.signals import PlannedSignal, SentSignal, measure, schedule, send_all
from bench.faults.streams import Answer, Clients, differences, mixed_bodies
from bench.harness.quiet import wait_until_quiet
from bench.harness.repeats import figure
from bench.harness.tables import markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The rank that gets signals, which and how many, and the number of streams."""

    name: str
    num_streams: int
    num_signals: int
    number: signal.Signals = signal.SIGKILL
    rank: int = 0
    longest: int = 600
    """The most tokens of an answer."""
    num_ranks: int = 1
    flags: tuple[str, ...] = ()


def run_scenario(fixture: Fixture, scenario: Scenario, report: Report) -> None:
    """Run a scenario and add its findings to the report."""
    num_streams = fixture.scaled(scenario.num_streams, least=4)
    bodies = mixed_bodies(num_streams, longest=scenario.longest)
    flags = (
        "--deterministic=on",
        f"--max-concurrent-requests={num_streams + 8}",
        *scenario.flags,
        *fixture.flags,
    )
    wait_until_quiet(fixture.quiet)
    with deployed(
        fixture.model, *flags, log=fixture.log(scenario.name), num_ranks=scenario.num_ranks
    ) as deployment:
        stop = report.watch(deployment.server)
        undisturbed, seconds = asyncio.run(_undisturbed(deployment, bodies))
        num_tokens = sum(len(answer.events) for answer in undisturbed)
        signals = schedule(
            fixture.scaled(scenario.num_signals),
            num_tokens=num_tokens,
            rank=scenario.rank,
            number=scenario.number,
            seed=f"{fixture.seed}/{scenario.name}",
        )
        answers, sent, metrics = asyncio.run(_disturbed(deployment, bodies, signals))
        measure(sent, answers, deployment)
        stop()
    lost = differences(undisturbed, answers)
    report.problems += lost
    if len(sent) < len(signals):
        report.problems.append(f"{scenario.name}: not all of {len(signals)} signals were sent")
    report.paragraphs.append(_paragraph(scenario, answers, sent, lost, seconds))
    report.paragraphs.append(table(sent))
    report.data[scenario.name] = {
        "streams": len(answers),
        "tokens": num_tokens,
        "lost": lost,
        "undisturbed_seconds": seconds,
        "signals": [
            {
                "after_tokens": one.num_tokens,
                "in_recovery": one.planned.in_recovery,
                "first_token": one.first_token,
                "all_moving": one.all_moving,
                "parts": one.parts,
            }
            for one in sent
        ],
        "metrics": recovery_series(metrics),
    }


async def _disturbed(
    deployment: Deployment, bodies: Sequence[dict[str, Any]], signals: Sequence[PlannedSignal]
) -> tuple[list[Answer], list[SentSignal], str]:
    """Return the answers, the signals that were sent meanwhile, and the metrics after them."""
    async with Clients(deployment.url) as clients:
        answering = asyncio.create_task(clients.send_all(bodies))
        sending = asyncio.create_task(send_all(deployment, clients, signals))
        answers = await answering
        sending.cancel()
        (sent,) = await asyncio.gather(sending, return_exceptions=True)
        if isinstance(sent, BaseException):
            sent = []
        return answers, sent, await clients.text("/metrics")


async def _undisturbed(
    deployment: Deployment, bodies: Sequence[dict[str, object]]
) -> tuple[list[Answer], float]:
    async with Clients(deployment.url) as clients:
        start = time.perf_counter()
        return await clients.send_all(bodies), time.perf_counter() - start


def _paragraph(
    scenario: Scenario,
    answers: Sequence[Answer],
    sent: Sequence[SentSignal],
    lost: Sequence[str],
    seconds: float,
) -> str:
    firsts = [one.first_token for one in sent if one.first_token is not None]
    moving = [one.all_moving for one in sent if one.all_moving is not None]
    tokens = sum(len(answer.events) for answer in answers)
    errors = sum(bool(answer.error) for answer in answers)
    text = (
        f"**{scenario.name}**: {len(answers)} streams, {tokens} tokens ({seconds:.1f} s undisturbed),"
        f" {len(sent)} times {scenario.number.name} to rank {scenario.rank}:"
        f" {len(answers) - len(lost)} outputs identical to the undisturbed run, {errors} client errors."
    )
    if firsts:
        text += (
            f" From signal to first new token: p50 {median(firsts):.2f} s, max {max(firsts):.2f} s."
        )
    if moving:
        text += f" To all streams moving: p50 {median(moving):.2f} s, max {max(moving):.2f} s."
    return text


def table(sent: Sequence[SentSignal]) -> str:
    """A row for each signal, and the median of each column."""
    titles = ("signal", "tokens before", "first new token", "all moving", *PARTS)
    rows = [
        (
            f"{place}{' (in the recovery before)' if one.planned.in_recovery else ''}",
            str(one.num_tokens),
            *(map(_seconds, (one.first_token, one.all_moving))),
            *(_seconds(one.parts.get(part)) for part in PARTS),
        )
        for place, one in enumerate(sent, 1)
    ]
    columns = [
        [one.first_token for one in sent],
        [one.all_moving for one in sent],
        *([one.parts.get(part) for one in sent] for part in PARTS),
    ]
    rows.append(("median", "", *(_seconds(_median(column)) for column in columns)))
    return markdown(titles, rows)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{figure(value)} s"


def kills(fixture: Fixture) -> Report:
    """The only shard is killed."""
    report = Report()
    run_scenario(fixture, Scenario(name="kills", num_streams=200, num_signals=10), report)
    return report


def ranks(fixture: Fixture) -> Report:
    """Rank 1 of 2 is killed."""
    report = Report()
    scenario = Scenario(
        name="rank 1 of 2",
        num_streams=50,
        num_signals=3,
        rank=1,
        longest=300,
        num_ranks=2,
    )
    run_scenario(fixture, scenario, report)
    return report


def hang(fixture: Fixture) -> Report:
    """The only shard, and then rank 1 of 2, stops without ending."""
    report = Report()
    for name, rank, num_ranks in (("stopped", 0, 1), ("stopped, rank 1 of 2", 1, 2)):
        scenario = Scenario(
            name=name,
            num_streams=50,
            num_signals=2,
            number=signal.SIGSTOP,
            rank=rank,
            longest=300,
            num_ranks=num_ranks,
            flags=("--step-timeout=3",),
        )
        run_scenario(fixture, scenario, report)
    return report


KILLS = Part(name="kills", title="Shards killed under 200 streams", run=kills)
RANKS = Part(name="ranks", title="One rank of two killed", run=ranks)
HANG = Part(name="hang", title="Shards that hang", run=hang)
