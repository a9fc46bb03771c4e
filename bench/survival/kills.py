"""Shards are killed or stopped while streams run, and every stream is compared with an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.quiet import wait_until_quiet
from bench.repeats import figure
from bench.report import markdown
from bench.survival.blows import Fallen, measure, schedule, strike
from bench.survival.deployment import Deployment, deployed
from bench.survival.lab import Lab, Part, Report
from bench.survival.recovery import PARTS
from bench.survival.streams import Answer, Clients, differences, mixed_bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who is harmed, how and how often, and among how many streams."""

    name: str
    num_streams: int
    num_blows: int
    number: signal.Signals = signal.SIGKILL
    rank: int = 0
    longest: int = 600
    """Most tokens of an answer."""
    flags: tuple[str, ...] = ()


def shown(lab: Lab, scenario: Scenario, report: Report) -> None:
    """Run a scenario and add what it showed to the report."""
    num_streams = lab.scaled(scenario.num_streams, least=4)
    bodies = mixed_bodies(num_streams, longest=scenario.longest)
    flags = (
        "--deterministic=on",
        f"--max-concurrent-requests={num_streams + 8}",
        *scenario.flags,
        *lab.flags,
    )
    wait_until_quiet(lab.quiet)
    with deployed(lab.model, *flags, log=lab.log(scenario.name)) as deployment:
        stop = report.watch(deployment.server)
        undisturbed, seconds = asyncio.run(_undisturbed(deployment, bodies))
        num_tokens = sum(len(answer.events) for answer in undisturbed)
        blows = schedule(
            lab.scaled(scenario.num_blows),
            num_tokens=num_tokens,
            rank=scenario.rank,
            number=scenario.number,
            seed=f"{lab.seed}/{scenario.name}",
        )

        async def disturbed() -> tuple[list[Answer], list[Fallen], str]:
            async with Clients(deployment.url) as clients:
                answering = asyncio.create_task(clients.send_all(bodies))
                striking = asyncio.create_task(strike(deployment, clients, blows))
                answers = await answering
                striking.cancel()
                (fallen,) = await asyncio.gather(striking, return_exceptions=True)
                if isinstance(fallen, BaseException):
                    fallen = []
                return answers, fallen, await clients.text("/metrics")

        answers, fallen, metrics = asyncio.run(disturbed())
        measure(fallen, answers, deployment)
        stop()
    lost = differences(undisturbed, answers)
    report.problems += lost
    if len(fallen) < len(blows):
        report.problems.append(f"{scenario.name}: not all of {len(blows)} blows fell")
    report.paragraphs.append(_paragraph(scenario, answers, fallen, lost, seconds))
    report.paragraphs.append(table(fallen))
    report.data[scenario.name] = {
        "streams": len(answers),
        "tokens": num_tokens,
        "lost": lost,
        "undisturbed_seconds": seconds,
        "blows": [
            {
                "after_tokens": one.num_tokens,
                "in_recovery": one.blow.in_recovery,
                "first_token": one.first_token,
                "all_moving": one.all_moving,
                "parts": one.parts,
            }
            for one in fallen
        ],
        "metrics": [
            line
            for line in metrics.splitlines()
            if line.startswith(("millrace_recover", "millrace_requests_replayed"))
            and "_bucket" not in line
        ],
    }


async def _undisturbed(
    deployment: Deployment, bodies: Sequence[dict[str, object]]
) -> tuple[list[Answer], float]:
    async with Clients(deployment.url) as clients:
        start = time.perf_counter()
        return await clients.send_all(bodies), time.perf_counter() - start


def _paragraph(
    scenario: Scenario,
    answers: Sequence[Answer],
    fallen: Sequence[Fallen],
    lost: Sequence[str],
    seconds: float,
) -> str:
    firsts = [one.first_token for one in fallen if one.first_token is not None]
    moving = [one.all_moving for one in fallen if one.all_moving is not None]
    tokens = sum(len(answer.events) for answer in answers)
    errors = sum(bool(answer.error) for answer in answers)
    text = (
        f"**{scenario.name}**: {len(answers)} streams, {tokens} tokens ({seconds:.1f} s undisturbed),"
        f" {len(fallen)} times {scenario.number.name} to rank {scenario.rank}:"
        f" {len(answers) - len(lost)} outputs identical to the undisturbed run, {errors} client errors."
    )
    if firsts:
        text += (
            f" From signal to first new token: p50 {median(firsts):.2f} s, max {max(firsts):.2f} s."
        )
    if moving:
        text += f" To all streams moving: p50 {median(moving):.2f} s, max {max(moving):.2f} s."
    return text


def table(fallen: Sequence[Fallen]) -> str:
    """A row for each blow, and the median of each column."""
    titles = ("blow", "tokens before", "first new token", "all moving", *PARTS)
    rows = [
        (
            f"{place}{' (in the recovery before)' if one.blow.in_recovery else ''}",
            str(one.num_tokens),
            *(map(_seconds, (one.first_token, one.all_moving))),
            *(_seconds(one.parts.get(part)) for part in PARTS),
        )
        for place, one in enumerate(fallen, 1)
    ]
    columns = [
        [one.first_token for one in fallen],
        [one.all_moving for one in fallen],
        *([one.parts.get(part) for one in fallen] for part in PARTS),
    ]
    rows.append(("median", "", *(_seconds(_median(column)) for column in columns)))
    return markdown(titles, rows)


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{figure(value)} s"


def kills(lab: Lab) -> Report:
    """The only shard is killed."""
    report = Report()
    shown(lab, Scenario(name="kills", num_streams=200, num_blows=10), report)
    return report


def ranks(lab: Lab) -> Report:
    """Rank 1 of 2 is killed."""
    report = Report()
    scenario = Scenario(
        name="rank 1 of 2",
        num_streams=50,
        num_blows=3,
        rank=1,
        longest=300,
        flags=("--num-shard=2",),
    )
    shown(lab, scenario, report)
    return report


def hang(lab: Lab) -> Report:
    """The only shard, and then rank 1 of 2, stops without ending."""
    report = Report()
    for name, rank, flags in (
        ("stopped", 0, ()),
        ("stopped, rank 1 of 2", 1, ("--num-shard=2",)),
    ):
        scenario = Scenario(
            name=name,
            num_streams=50,
            num_blows=2,
            number=signal.SIGSTOP,
            rank=rank,
            longest=300,
            flags=("--step-timeout=3", *flags),
        )
        shown(lab, scenario, report)
    return report


KILLS = Part(name="kills", title="Shards killed under 200 streams", run=kills)
RANKS = Part(name="ranks", title="One rank of two killed", run=ranks)
HANG = Part(name="hang", title="Shards that hang", run=hang)
