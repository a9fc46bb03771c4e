"""One request among fifty breaks the shards, in each possible way."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from bench.faults.deployment import Deployment, deployed
from bench.faults.fixture import Fixture, Part, Report
from bench.faults.streams import Answer, Clients, differences, mixed_bodies
from bench.harness.command_line import say
from bench.harness.paths import ROOT
from bench.harness.quiet import wait_until_quiet
from bench.harness.scrape import parse
from bench.harness.tables import markdown

SHARDS = ROOT / "tests" / "support" / "millrace_testing" / "shards"
LAUNCHER = (str(SHARDS / "shard_launcher.py"), str(SHARDS / "poison_shard.py"))
NUM_REQUESTS, LONGEST = 50, 200
API_KEY = "faults"
HEADERS = {"authorization": f"Bearer {API_KEY}"}
MARK = " 90909 wqxz wqxz"
"""The end of the poison prompt."""
NUM_MARK_TOKENS = 6
PLACE = 17
"""Position of the poison among the requests."""
FLAGS = (
    "--deterministic=on",
    "--step-timeout=3",
    f"--api-key={API_KEY}",
    f"--max-concurrent-requests={NUM_REQUESTS + 8}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to break the shards, and its expected outcome."""

    name: str
    environment: Mapping[str, str]
    ends_with: str = "424"
    """The error that the client of the poison must see; empty for a right answer."""
    records: int = 1
    """Expected number of records at `/v1/quarantine`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The outcome of a kind."""

    lost: Sequence[str]
    """Differences of the other requests from the undisturbed run."""
    poisoned: Answer
    failures: float
    """Failed steps, with or without a restart."""
    restarts: int
    records: int
    seconds: float


def bound(num_requests: int) -> float:
    """The most failures that the search for one request among `num_requests` may take."""
    return 2 * math.log2(num_requests) + 2


def poisoned_bodies() -> list[dict[str, Any]]:
    """All bodies, one of which ends with the mark."""
    bodies = mixed_bodies(NUM_REQUESTS, longest=LONGEST)
    bodies[PLACE] = {**bodies[PLACE], "inputs": bodies[PLACE]["inputs"] + MARK}
    return bodies


def mark_ids(tokenizer: Tokenizer, bodies: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens that only the poison has; ValueError if another prompt has them too."""
    prompts = [tokenizer.encode(body["inputs"]).ids for body in bodies]
    ids = prompts[PLACE][-NUM_MARK_TOKENS:]
    found = [
        number
        for number, prompt in enumerate(prompts)
        if any(prompt[k : k + len(ids)] == ids for k in range(len(prompt)))
    ]
    if found != [PLACE]:
        raise ValueError(f"the poison is in prompts {found}")
    return ids


def kinds(ids: Sequence[int]) -> list[Kind]:
    """Every kind, for a poison of these tokens."""
    poison = ",".join(map(str, ids))
    ways = [
        Kind(
            name=how,
            environment={"MILLRACE_TEST_POISON": poison, "MILLRACE_TEST_POISON_HOW": how},
            records=0 if how == "oom" else 1,
        )
        for how in ("kill", "segv", "raise", "hang", "oom")
    ]
    size = Kind(
        name="oom by size",
        environment={"MILLRACE_TEST_OOM_ROWS": "20", "MILLRACE_TEST_OOM_TOKENS": "200"},
        ends_with="",
        records=0,
    )
    return [*ways, size]


async def _answers(deployment: Deployment, bodies: Sequence[Mapping[str, Any]]) -> list[Answer]:
    async with Clients(deployment.url, headers=HEADERS) as clients:
        return await clients.send_all(bodies)


async def _disturbed(
    deployment: Deployment, bodies: Sequence[Mapping[str, Any]], undisturbed: Sequence[Answer]
) -> Found:
    async with Clients(deployment.url, headers=HEADERS) as clients:
        before = time.perf_counter()
        answers = await clients.send_all(bodies)
        seconds = time.perf_counter() - before
        samples = parse(await clients.text("/metrics"))
        records = orjson.loads(await clients.text("/v1/quarantine"))["quarantined"]
    starts = [line for line in deployment.lines() if line.message.startswith("Starting shard")]
    return Found(
        lost=differences(undisturbed, answers, but=PLACE),
        poisoned=answers[PLACE],
        failures=sum(
            value
            for series, value in samples.items()
            if series.startswith("millrace_recoveries_total")
        ),
        restarts=len(starts) - 1,
        records=len(records),
        seconds=seconds,
    )


def problems(kind: Kind, found: Found, undisturbed: Answer) -> list[str]:
    """Violations."""
    lines = [f"{kind.name}: {line}" for line in found.lost]
    poisoned = found.poisoned
    if not kind.ends_with and (poisoned.error or poisoned.outcome != undisturbed.outcome):
        lines.append(f"{kind.name}: its own answer is wrong: {poisoned.error}")
    if kind.ends_with and kind.ends_with not in outcome(poisoned):
        lines.append(f"{kind.name}: the poison ended with {outcome(poisoned)!r}")
    if found.restarts > bound(NUM_REQUESTS):
        lines.append(f"{kind.name}: {found.restarts} restarts")
    if found.records != kind.records:
        lines.append(f"{kind.name}: {found.records} records instead of {kind.records}")
    return lines


def outcome(answer: Answer) -> str:
    """The outcome that a client saw, in a word or two."""
    if not answer.error:
        return "answered"
    is_generation = '"error_type":"generation"' in answer.error
    # A stream has sent its status already, so that its last event stands for the 424 of a whole answer.
    return (
        "424" if answer.status == 424 or (answer.status == 200 and is_generation) else answer.error
    )


def run(fixture: Fixture) -> Report:
    report, bodies = Report(), poisoned_bodies()
    ids = mark_ids(Tokenizer.from_file(str(fixture.model / "tokenizer.json")), bodies)
    wait_until_quiet(fixture.quiet)
    with deployed(fixture.model, *FLAGS, *fixture.flags, log=fixture.log("poison")) as deployment:
        undisturbed = asyncio.run(_answers(deployment, bodies))
    rows = []
    for kind in kinds(ids):
        say(f"poison: {kind.name}")
        with deployed(
            fixture.model,
            *FLAGS,
            *fixture.flags,
            log=fixture.log(f"poison {kind.name}"),
            launcher=LAUNCHER,
            environment=kind.environment,
        ) as deployment:
            stop = report.watch(deployment.server)
            found = asyncio.run(_disturbed(deployment, bodies, undisturbed))
            stop()
        report.problems += problems(kind, found, undisturbed[PLACE])
        right = NUM_REQUESTS - 1 - len(found.lost)
        report.data[kind.name] = _figures(found, right)
        rows.append(
            (
                *(kind.name, f"{right} of {NUM_REQUESTS - 1}", outcome(found.poisoned)),
                *(f"{n:.0f}" for n in (found.failures, found.restarts, found.records)),
                f"{found.seconds:.1f} s",
            )
        )
    report.paragraphs = [
        f"{NUM_REQUESTS} streams at once; one of them breaks each of its steps, in a test shard."
        f" At most {bound(NUM_REQUESTS):.0f} restarts are allowed. Hangs are detected after 3 s"
        ' (`--step-timeout`). "oom by size" has no poison: every step of more than 20 rows or 200 tokens'
        " runs out of memory.",
        markdown(
            (
                *("poison", "right answers of the others", "the poison", "failed steps"),
                *("restarts", "records at /v1/quarantine", "all ended after"),
            ),
            rows,
        ),
    ]
    return report


def _figures(found: Found, right: int) -> dict[str, object]:
    return {
        "right": right,
        "poison": outcome(found.poisoned),
        "failures": found.failures,
        "restarts": found.restarts,
        "records": found.records,
        "seconds": found.seconds,
    }


PART = Part(name="poison", title="One poison request among 50", run=run)
