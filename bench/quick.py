"""`python -m bench.quick`: has our engine become slower? About three minutes, ours alone.

Each case is compared as a share of the roofline that the same run measures, and steps with weights of 4 bits as times
the speed of bfloat16 in the same run, so that a slow machine fails nothing. Floors are kept by family of CPUs; another
family is compared with nothing. Exit code 0: as fast as recorded in floors.json; 1: slower; 2: unknown, because nothing
is recorded or other processes used the machine. `--record` writes new floors for this family, and bench/results, unless
other processes used the machine. `--instruction-set avx2` measures this CPU as one without AVX-512.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from bench.comparison import roofline
from bench.comparison.cases import CASES
from bench.comparison.offline import run_cases
from bench.comparison.plan import Plan
from bench.comparison.report import case_table, share_of_roofline
from bench.harness.checkpoints import SHAPES, Shape, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.machine import CpuMeter, cpu_family
from bench.harness.paths import BENCH, MODELS_FOLDER
from bench.harness.quiet import Quiet, wait_until_quiet
from bench.harness.record import Record
from bench.harness.repeats import BUSY_CORES
from bench.peers.engines import OURS
from bench.peers.process import EngineError
from bench.peers.servers import HELD, hold_to
from bench.quantized.steps import BASE, KINDS, STEPS, Model, medians
from millrace_proto.cores import usable_cores
from millrace_shard.kernels.build import load_operators

FLOORS = BENCH / "floors.json"
MODEL = "135m"
LEFT_OUT = ("64 ragged",)
"""Cases that take too long."""
CODED = ("int4", "int4 int8")
"""Kinds of steps with weights of 4 bits: exact activations, and activations in int8."""
ROUNDS = 5
SOURCE = "from"
"""Key in floors.json of the run that measured a family's floors."""
TOLERANCE = 0.85
"""The least part of the recorded figure that passes; repetitions on one machine differ by up to a tenth."""
PASSED, SLOWER, UNKNOWN = 0, 1, 2


class Unit(StrEnum):
    """The unit: the roofline, or our own bfloat16."""

    ROOFLINE = "the roofline"
    BFLOAT16 = "bfloat16"

    def text(self, value: float) -> str:
        """`value` as people read it."""
        share = f"{100 * value:.1f} % of" if self is Unit.ROOFLINE else f"{value:.2f} times"
        return f"{share} {self}"


@dataclass(frozen=True, slots=True)
class Figure:
    """How fast one case was."""

    case: str
    unit: Unit
    value: float
    is_clean: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One case against its floor."""

    figure: Figure
    recorded: float | None

    @property
    def status(self) -> int:
        """PASSED, SLOWER or UNKNOWN; a disturbed figure can pass but not fail."""
        if self.recorded is None:
            return UNKNOWN
        if self.figure.value >= TOLERANCE * self.recorded:
            return PASSED
        return SLOWER if self.figure.is_clean else UNKNOWN

    @property
    def text(self) -> str:
        """One line of text."""
        figure, unit = self.figure, self.figure.unit
        word = ("passed", "SLOWER", "unknown")[self.status]
        mark = "" if figure.is_clean else "~"
        floor = "nothing" if self.recorded is None else unit.text(self.recorded)
        return f"{figure.case}: {mark}{unit.text(figure.value)}, recorded {floor}: {word}"


def verdict(findings: Sequence[Finding]) -> int:
    """SLOWER if any case is slower, else UNKNOWN if any is unknown, else PASSED."""
    statuses = {finding.status for finding in findings}
    return next((s for s in (SLOWER, UNKNOWN) if s in statuses), PASSED)


def read_floors(path: Path, family: str | None) -> dict[str, float]:
    """Recorded figures of a family of CPUs by case; empty for a family without any, and without a file."""
    families = json.loads(path.read_text()) if path.exists() else {}
    return {case: each for case, each in families.get(family, {}).items() if case != SOURCE}


def write_floors(path: Path, family: str, figures: Mapping[str, float], *, source: str) -> None:
    """Record figures, rounded, of the run `source`; those of other families stay."""
    families = json.loads(path.read_text()) if path.exists() else {}
    rounded = {case: round(value, 3) for case, value in figures.items()}
    families[family] = {SOURCE: source, **rounded}
    path.write_text(json.dumps(families, indent=2) + "\n")


def coded_steps(shape: Shape, quiet: Quiet, threads: int) -> list[Figure]:
    """How many times as fast as with bfloat16 weights the steps of a decoder are with weights of 4 bits."""
    load_operators()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    figures = list[Figure]()
    with torch.inference_mode():
        models = {kind: Model(shape, KINDS[kind]) for kind in (BASE, *CODED)}
        for step, (contexts, queries) in STEPS.items():
            calls = {kind: model.step(contexts, queries) for kind, model in models.items()}
            wait_until_quiet(quiet)
            meter = CpuMeter(list)
            seconds = medians(calls, ROUNDS)
            is_clean = meter.stop().other_cores < BUSY_CORES
            figures += [
                Figure(f"{kind}, {step}", Unit.BFLOAT16, seconds[BASE] / seconds[kind], is_clean)
                for kind in CODED
            ]
    return figures


def main() -> int:
    """Measure, print and compare."""
    parser = run_parser("quick", __doc__, patience=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--floors", type=Path, default=FLOORS)
    parser.add_argument("--instruction-set", choices=tuple(HELD), help="hold this CPU to it")
    options = parser.parse_args()
    hold_to(options.instruction_set)
    family = cpu_family()
    if family is None and options.record:
        say("nothing is recorded: bench/harness/machine.py knows no family of this CPU")
        return UNKNOWN
    try:
        figures, machine = measured(options)
    except EngineError as error:
        say(str(error))
        return SLOWER
    floors = read_floors(options.floors, family)
    findings = [Finding(each, floors.get(each.case)) for each in figures]
    if family is None:
        print("Nothing is compared: bench/harness/machine.py knows no family of this CPU")
    elif not floors:
        print(f"Nothing is compared: no floors of {family} are recorded; --record records them")
    print("\n".join(finding.text for finding in findings))
    if options.record and family is not None:
        return write_record(options.floors, family, figures, machine)
    return verdict(findings)


def write_record(
    floors: Path, family: str, figures: Sequence[Figure], machine: roofline.Machine
) -> int:
    """Record the run and its figures as the floors of `family`; nothing, and UNKNOWN, if it was disturbed."""
    if disturbed := [figure.case for figure in figures if not figure.is_clean]:
        say(f"nothing is recorded: other processes used the machine during {', '.join(disturbed)}")
        return UNKNOWN
    values = {figure.case: figure.value for figure in figures}
    record = Record(
        bench="quick",
        title=f"{MODEL} shape, {family}",
        command=command("quick"),
        figures={"roofline": machine.as_json(), "figures": values},
    )
    write_floors(floors, family, values, source=f"results/{record.write().name}")
    return PASSED


def measured(options: argparse.Namespace) -> tuple[list[Figure], roofline.Machine]:
    """Every figure, and the machine. Prints the table of the cases. Raises EngineError."""
    shape, threads = SHAPES[MODEL], usable_cores()
    plan = Plan(
        engines=[OURS],
        repeats=options.repeats,
        threads=threads,
        quiet=Quiet(idle_seconds=1.0, patience_seconds=options.patience),
        out=options.out,
    )
    model = ensure_checkpoint(MODEL, folder=MODELS_FOLDER)
    cases = [case for case in CASES[MODEL] if case.name not in LEFT_OUT]
    machine = roofline.measure(threads, plan.quiet)
    rows = run_cases(model, cases, plan, [])
    machine = machine.best(roofline.measure(threads, plan.quiet))
    print(f"{machine.text()}\n\n{case_table(rows, shape, machine)}\n")
    figures = [
        Figure(
            row.case.name,
            Unit.ROOFLINE,
            share_of_roofline(row, shape, machine),
            machine.is_clean and row.repeated.is_clean,
        )
        for row in rows
    ]
    return [*figures, *coded_steps(shape, plan.quiet, threads)], machine


if __name__ == "__main__":
    sys.exit(main())
