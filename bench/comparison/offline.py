"""Every engine on the same requests, in turn, on a quiet machine.

All engines hold their model at once, and all except one are frozen. Repetitions of different engines are
seconds apart, so that the drift of the machine's speed affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bench.comparison.cases import Case, limits_for, tokenizer_of, warm_up
from bench.comparison.plan import Attempt, Plan
from bench.harness.command_line import say
from bench.harness.machine import CpuMeter
from bench.harness.quiet import wait_until_quiet
from bench.harness.repeats import Repeated, Sample
from bench.peers.engines import OFFLINE, SHARD_FLAGS, Offline
from bench.peers.process import EngineError, EngineProcess
from bench.peers.worker import Limits, Request
from millrace.load.measurement import Timeline


@dataclass(slots=True)
class Row:
    """One case of one engine."""

    case: Case
    engine: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def repeated(self) -> Repeated:
        """Its repetitions."""
        return Repeated(tuple(self.samples))


def run_cases(model: Path, cases: Sequence[Case], plan: Plan, notes: list[str]) -> list[Row]:
    """Every case on every engine, `repeats` times in turn. Raises EngineError when ours fails.

    A peer that fails is left out of the rest, with a note.
    """
    tokenizer = tokenizer_of(model)
    requests = {case.name: case.requests(tokenizer) for case in cases}
    rows: dict[tuple[str, str], Row] = {}
    with loaded_engines(model, cases, plan, notes) as engines:
        for repetition in range(plan.repeats):
            for case in cases:
                for name, engine in list(engines.items()):
                    say(f"{model.name} {case.name} {repetition + 1}/{plan.repeats}: {name}")
                    with Attempt(name, notes) as attempt:
                        sample = measure_case(engine, case, requests[case.name], plan)
                        row = rows.setdefault((case.name, name), Row(case, name))
                        row.samples.append(sample)
                    if attempt.failed:
                        del engines[name]
    return list(rows.values())


def measure_case(
    engine: EngineProcess, case: Case, requests: Sequence[Request], plan: Plan
) -> Sample:
    """One repetition on a quiet machine."""
    wait_until_quiet(plan.quiet)
    timelines, others = timed(engine, requests, case.at_once)
    return Sample(case.value(timelines), others)


def timed(
    engine: EngineProcess, requests: Sequence[Request], concurrency: int
) -> tuple[list[Timeline], float]:
    """One run, and the cores that other processes used meanwhile."""
    meter = CpuMeter(engine.processes)
    timelines = engine.run(requests, concurrency)
    return timelines, meter.stop().other_cores


@contextmanager
def loaded_engines(
    model: Path, cases: Sequence[Case], plan: Plan, notes: list[str]
) -> Iterator[dict[str, EngineProcess]]:
    """Every engine of the plan, warmed up and frozen, for the length of the block."""
    limits = limits_for(cases, threads=plan.threads)
    warming = warm_up(cases)
    requests = warming.requests(tokenizer_of(model))
    started: list[EngineProcess] = []
    engines: dict[str, EngineProcess] = {}
    try:
        chosen = [engine for engine in OFFLINE if engine.name in plan.engines]
        for offline in (*chosen, *plan.more_offline):
            if not offline.is_installed:
                continue
            with Attempt(offline.name, notes):
                engine = start_engine(offline, model, limits, plan)
                started.append(engine)
                engine.run(requests, warming.at_once)
                engines[offline.name] = engine
        yield engines
    finally:
        for engine in started:
            engine.end()


def start_engine(offline: Offline, model: Path, limits: Limits, plan: Plan) -> EngineProcess:
    """Start it and load the model; raises EngineError or ConversionError."""
    say(f"{model.name}: loading {offline.name}")
    converted = offline.convert(model)
    engine = offline.start(
        log=plan.out / f"{model.name}-{offline.name}.log",
        extra={SHARD_FLAGS: " ".join(plan.shard_flags)} if plan.shard_flags else None,
    )
    try:
        engine.load(converted.absolute(), limits)
    except EngineError:
        engine.end()
        raise
    return engine
