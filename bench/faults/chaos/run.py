"""One campaign: undisturbed answers, load and faults, the audit."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from pathlib import Path

from bench.faults.adapters import CHANGING, LATE, SHELVED, STEADY, WHOLE, Adapters
from bench.faults.chaos.adapter_faults import set_version
from bench.faults.chaos.allowed_errors import AllowedError, AllowedErrors
from bench.faults.chaos.answers import difference
from bench.faults.chaos.audit import Ledger, Reading, leaks, not_idle, read
from bench.faults.chaos.campaign import Fault, campaign
from bench.faults.chaos.client import Client
from bench.faults.chaos.injection import NotRecoveredError, finish_others, inject, missing
from bench.faults.chaos.load import Load
from bench.faults.chaos.pauses import Arrivals, Pause, parts
from bench.faults.chaos.population import greedy_streams, mixed_streams, population
from bench.faults.chaos.scene import Scene
from bench.faults.deployment import Deployment
from bench.harness.command_line import say

IDLE_SECONDS = 30.0
POLL_SECONDS = 0.1
NUM_AGAIN = 20
"""Requests that are sent once more, one at a time, after the last fault."""
SHARED_MEMORY = Path("/dev/shm")
COUNTED = {
    "millrace_requests_replayed_total": "requests replayed",
    "millrace_preemptions_total": "preemptions",
    "millrace_requests_quarantined_total": "requests quarantined",
    "millrace_adapter_loads_total": "loads of adapters",
    "millrace_adapter_evictions_total": "evictions",
    'millrace_adapter_fetches_total{outcome="fetched"}': "fetches",
}
"""Counters of the router; a new router process starts at 0."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a campaign."""

    ledger: Ledger = field(default_factory=Ledger)
    recovered: list[tuple[Fault, Pause | None]] = field(default_factory=list)
    """Faults, with what a fatal one cost the clients."""
    parts: list[dict[str, float]] = field(default_factory=list)
    """Seconds by part of each pause, where all of them were logged."""
    not_recovered: list[Fault] = field(default_factory=list)
    before: dict[str, Reading] = field(default_factory=dict)
    after: dict[str, Reading] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    num_processes: int = 0
    """Router and shard processes in the whole campaign."""
    exit_code: int | None = None


async def run(server: Deployment, options: argparse.Namespace, adapters: Adapters) -> Outcome:
    """Run the campaign on a running server, and stop it."""
    outcome = Outcome()
    faults = campaign(
        options.seed,
        num_faults=options.faults,
        num_ranks=server.num_ranks,
        kinds=options.kinds,
        longest_delay=options.pace,
    )
    allowed, pids = AllowedErrors(), server.members().pids()
    async with Client(
        server.url, ledger=outcome.ledger, allowed=allowed, arrivals=Arrivals()
    ) as client:
        scene = _scene(server, client, options, adapters)
        await _refer(scene)
        await _crowd(scene, options.clients)
        await _idle(server)
        outcome.ledger.seconds.clear()
        outcome.before = _usages(server)
        await _run_load(scene, faults, outcome, options, pids)
        if not outcome.not_recovered:
            for request in scene.requests[:NUM_AGAIN]:
                await client.ask(request)
            # The last one needs nearly all memory for adapters: a lost page would let it wait for ever.
            for streams in scene.adapted.values():
                await client.ask(streams[0])
            await _audit_life(server, outcome)
        outcome.num_processes = len(pids)
    outcome.parts = _parts(server, outcome)
    outcome.exit_code = await asyncio.to_thread(server.stop)
    _audit_end(server, outcome, pids)
    for name in adapters.partials():
        outcome.ledger.wrong(f"left in the adapter cache: {name}")
    return outcome


def _scene(
    server: Deployment, client: Client, options: argparse.Namespace, adapters: Adapters
) -> Scene:
    """The requests of a campaign, and the load of its clients."""
    seed, named = options.seed, (*STEADY, SHELVED, *CHANGING) if options.adapters else ()
    requests = population(seed, size=options.pool, adapters=named)
    if options.longest:
        requests = mixed_streams(options.pool, longest=options.longest)
    every = (*STEADY, *CHANGING, *LATE, WHOLE) if options.adapters else ()
    return Scene(
        server=server,
        client=client,
        load=Load(client, requests, num_clients=options.clients, seed=seed),
        adapters=adapters,
        requests=requests,
        long=greedy_streams(seed, count=options.long, new_tokens=200),
        unread=greedy_streams(seed, count=2, new_tokens=900, top_tokens=5, name="unread"),
        adapted={
            name: greedy_streams(seed, count=2, new_tokens=120, adapter=name) for name in every
        },
        max_concurrent=options.max_concurrent,
    )


async def _refer(scene: Scene) -> None:
    """Ask everything undisturbed, and what changing adapters answer with each of their versions."""
    client, started = scene.client, time.monotonic()
    requests = [*scene.requests, *scene.long, *chain.from_iterable(scene.adapted.values())]
    for request in requests:
        await client.refer(request)
    changing = [name for name in CHANGING if name in scene.adapted]
    for name in changing:
        await set_version(scene, name, 1)
    for request in requests:
        if request.adapter in changing:
            await client.refer(request)
    for name in changing:
        await set_version(scene, name, 0)
        former, new = client.references[scene.adapted[name][0].name]
        if difference(former, new) is None:
            client.ledger.wrong(f"both versions of {name} answer the same")
    num_answers = sum(map(len, client.references.values()))
    say(f"{num_answers} answers undisturbed, {time.monotonic() - started:.1f} s")


async def _crowd(scene: Scene, num_clients: int) -> None:
    """Ask as many at once as the load has clients, so that the buffers of such steps do not count as a leak."""
    requests = islice(cycle(scene.requests), num_clients)
    await asyncio.gather(*(scene.client.ask(one, may_be_refused=True) for one in requests))


async def _run_load(
    scene: Scene,
    faults: list[Fault],
    outcome: Outcome,
    options: argparse.Namespace,
    pids: set[int],
) -> None:
    """Send the load, with the faults, until both are complete or a fault was not recovered."""
    load, started = scene.load, time.monotonic()
    if options.clients > options.max_concurrent:
        scene.client.allowed.begin(AllowedError.REFUSALS, started)
    load.start()
    try:
        await _disturb(scene, faults, outcome, pids=pids, until=started + options.seconds)
        while not outcome.not_recovered and (
            load.num_sent < options.requests or time.monotonic() < started + options.least_seconds
        ):
            load.check()
            await asyncio.sleep(POLL_SECONDS)
        if not outcome.not_recovered:
            await finish_others(scene)
            await load.stop()
    finally:
        load.cancel()
        scene.client.allowed.end(AllowedError.REFUSALS, time.monotonic())
    outcome.seconds = time.monotonic() - started


async def _disturb(
    scene: Scene, faults: list[Fault], outcome: Outcome, *, pids: set[int], until: float
) -> None:
    for number, fault in enumerate(faults, start=1):
        if time.monotonic() > until:
            say(f"out of time after {number - 1} faults")
            return
        await asyncio.sleep(fault.delay)
        _count(scene.server, outcome)
        found = outcome.ledger.num_problems
        try:
            pause = await inject(scene, fault)
        except NotRecoveredError as error:
            outcome.not_recovered.append(fault)
            outcome.ledger.wrong(str(error))
            say(f"{number}/{len(faults)} {error}")
            return
        outcome.recovered.append((fault, pause))
        pids |= scene.server.members().pids()
        what = "" if pause is None else f", silence {pause.silence:.2f} s"
        new = outcome.ledger.num_problems - found
        say(
            f"{number}/{len(faults)} {fault.kind.value.text}{what}{f', {new} PROBLEMS' if new else ''}"
        )


def _count(server: Deployment, outcome: Outcome) -> None:
    """Keep the router's counters, because its end resets them."""
    try:
        metrics = server.metrics()
    except OSError:
        return
    for series, name in COUNTED.items():
        outcome.counters[name] = max(outcome.counters.get(name, 0.0), metrics.get(series, 0.0))


async def _idle(server: Deployment) -> list[str]:
    """Wait for an idle server; returns the violations that remain."""
    deadline = time.monotonic() + IDLE_SECONDS
    while found := not_idle(server.metrics()):
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL_SECONDS)
    return found


async def _audit_life(server: Deployment, outcome: Outcome) -> None:
    """Audit the idle server: gauges, resources and processes."""
    ledger = outcome.ledger
    for problem in await _idle(server):
        ledger.wrong(f"without requests, {problem}")
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        outcome.after = _usages(server)
        found = [
            leak
            for name, after in outcome.after.items()
            if name in outcome.before
            for leak in leaks(name, outcome.before[name], after)
        ]
        if not found or time.monotonic() > deadline:
            break
        await asyncio.sleep(POLL_SECONDS)
    for problem in found:
        ledger.wrong(problem)
    if not server.members().is_complete(server.num_ranks):
        ledger.wrong(f"in the end, {missing(server)}")
    _count(server, outcome)


def _usages(server: Deployment) -> dict[str, Reading]:
    """The resources of each process, by role."""
    return read(server.by_role())


def _parts(server: Deployment, outcome: Outcome) -> list[dict[str, float]]:
    to_unix, lines = time.time() - time.monotonic(), server.lines()
    pauses = [pause for _, pause in outcome.recovered if pause is not None]
    each = (
        parts(lines, since=pause.fault_at + to_unix, until=pause.resumed_at + to_unix)
        for pause in pauses
    )
    return [found for found in each if found]


def _audit_end(server: Deployment, outcome: Outcome, pids: set[int]) -> None:
    """Audit the state after SIGTERM: no process, socket or shared memory may be left."""
    ledger = outcome.ledger
    if outcome.exit_code != 0:
        ledger.wrong(f"exit code {outcome.exit_code} after SIGTERM")
    for process in server.leftovers():
        ledger.wrong(f"left running: {process}")
    for path in sorted(server.folder.iterdir()):
        ledger.wrong(f"left in the folder of sockets: {path.name}")
    if names := _shared_memory(pids):
        ledger.wrong(f"{len(names)} left in shared memory: {', '.join(names[:3])}")


def _shared_memory(pids: set[int]) -> list[str]:
    """Names in shared memory that hold the process id of one of ours."""
    if not SHARED_MEMORY.is_dir():
        return []
    numbers = set(map(str, pids))
    return [
        path.name
        for path in sorted(SHARED_MEMORY.iterdir())
        if any(part in numbers for part in path.name.split("_"))
    ]
