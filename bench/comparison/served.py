"""Every server on the same load, in turn, on a quiet machine; see `bench.comparison.offline`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bench.comparison.cases import tokenizer_of
from bench.comparison.offline import start_engine, timed
from bench.comparison.plan import Attempt, Plan
from bench.harness.command_line import say
from bench.harness.quiet import wait_until_quiet
from bench.harness.server import WARM_UP, RunningServer, measure
from bench.peers.engines import OFFLINE
from bench.peers.servers import SERVERS, Server
from bench.peers.worker import Limits, Request
from millrace.load.levels import Level
from millrace.load.measurement import Measurement, summarise

UNSERVED = "transformers"
"""An engine without a server, compared with servers; the cost of HTTP is not counted against it."""
OPEN_LOOP_STREAMS = 64
"""Streams to make room for in an open loop, which does not limit them."""
Run = Callable[[Level], Measurement]


def run_levels(
    model: Path, levels: Sequence[Level], plan: Plan, notes: list[str]
) -> list[Measurement]:
    """Every level on every server, `repeats` times in turn; open loops are for servers only.

    Raises ServerError when ours fails, and ValueError when none of its requests succeeded. A peer
    that fails is left out of the rest, with a note.
    """
    limits = level_limits(levels, threads=plan.threads)
    found: list[Measurement] = []
    with ExitStack() as stack:
        running = start_servers(model, limits, plan, notes, stack=stack)
        running |= start_unserved(model, limits, plan, notes, stack=stack)
        for repetition in range(plan.repeats):
            for level in levels:
                for name, run in list(running.items()):
                    if level.concurrency is None and name == UNSERVED:
                        continue
                    say(f"{model.name} {level.name} {repetition + 1}/{plan.repeats}: {name}")
                    wait_until_quiet(plan.quiet)
                    with Attempt(name, notes) as attempt:
                        found.append(run(level))
                    if attempt.failed:
                        del running[name]
    return found


def level_limits(levels: Sequence[Level], *, threads: int) -> Limits:
    """Limits that fit the widest level and the longest sequence."""
    every = [WARM_UP, *levels]
    streams = max(level.concurrency or OPEN_LOOP_STREAMS for level in every)
    tokens = max(level.prompt_tokens + level.new_tokens for level in every) + 1
    return Limits(
        max_streams=streams, max_tokens=tokens, kv_tokens=streams * tokens, threads=threads
    )


def start_servers(
    model: Path, limits: Limits, plan: Plan, notes: list[str], *, stack: ExitStack
) -> dict[str, Run]:
    """Every installed server, warmed up and frozen; `stack` ends them."""
    running: dict[str, Run] = {}
    named = [s for s in SERVERS if s.name in plan.engines and s.is_installed]
    for server in (*named, *plan.more_servers):
        say(f"{model.name}: starting {server.name}")
        with Attempt(server.name, notes):
            log = plan.out / f"{model.name}-{server.name}-server.log"
            up = stack.enter_context(server.start(model, limits, log, plan.launcher_flags))
            run = thawed(server, up)
            run(WARM_UP)
            running[server.name] = run
    return running


def thawed(server: Server, up: RunningServer) -> Run:
    """Thaw, run a level, freeze."""

    def run(level: Level) -> Measurement:
        up.family.thaw()
        try:
            return measure(up, level, name=server.name)
        finally:
            up.family.freeze()

    return run


def start_unserved(
    model: Path, limits: Limits, plan: Plan, notes: list[str], *, stack: ExitStack
) -> dict[str, Run]:
    """The peer that is compared without a server."""
    if UNSERVED not in plan.engines:
        return {}
    offline = next(engine for engine in OFFLINE if engine.name == UNSERVED)
    tokenizer = tokenizer_of(model)
    running: dict[str, Run] = {}
    with Attempt(UNSERVED, notes):
        engine = start_engine(offline, model, limits, plan)
        stack.callback(engine.end)

        def run(level: Level) -> Measurement:
            prompts = [tokenizer.encode(text).ids for text in level.prompts()]
            requests = [Request(ids, level.new_tokens) for ids in prompts]
            timelines, others = timed(engine, requests, level.concurrency or len(requests))
            return replace(summarise(UNSERVED, level, timelines), other_cores=others)

        run(WARM_UP)
        running[UNSERVED] = run
    return running
