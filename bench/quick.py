"""`python -m bench.quick`: has our engine become slower? Under three minutes, ours alone.

Each case is compared as a share of the roofline that the same run measures, so that a slow machine
fails nothing. Exit code 0: as fast as recorded in floors.json; 1: slower; 2: unknown, because
nothing is recorded or other processes used the machine. `--record` writes new floors, and bench/results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.comparison import roofline
from bench.comparison.cases import CASES
from bench.comparison.offline import run_cases
from bench.comparison.plan import Plan
from bench.comparison.report import case_table, share_of_roofline
from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.paths import BENCH, MODELS_FOLDER
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.peers.engines import OURS
from bench.peers.process import EngineError
from millrace_launcher.host.threads import usable_cores

FLOORS = BENCH / "floors.json"
MODEL = "135m"
LEFT_OUT = ("64 ragged",)
"""Cases that take too long."""
TOLERANCE = 0.85
"""The least part of the recorded share that passes; repetitions on one machine differ by up to a tenth."""
PASSED, SLOWER, UNKNOWN = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One case against its floor."""

    case: str
    share: float
    is_clean: bool
    recorded: float | None

    @property
    def status(self) -> int:
        """PASSED, SLOWER or UNKNOWN; a disturbed figure can pass but not fail."""
        if self.recorded is None:
            return UNKNOWN
        if self.share >= TOLERANCE * self.recorded:
            return PASSED
        return SLOWER if self.is_clean else UNKNOWN

    @property
    def text(self) -> str:
        """One line of text."""
        word = ("passed", "SLOWER", "unknown")[self.status]
        mark = "" if self.is_clean else "~"
        floor = "nothing" if self.recorded is None else f"{100 * self.recorded:.1f} %"
        return (
            f"{self.case}: {mark}{100 * self.share:.1f} % of the roofline, recorded {floor}: {word}"
        )


def verdict(findings: Sequence[Finding]) -> int:
    """SLOWER if any case is slower, else UNKNOWN if any is unknown, else PASSED."""
    statuses = {finding.status for finding in findings}
    return next((s for s in (SLOWER, UNKNOWN) if s in statuses), PASSED)


def read_floors(path: Path) -> dict[str, float]:
    """Recorded shares by case; empty without a file."""
    floors: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return floors


def write_floors(path: Path, shares: Mapping[str, float]) -> None:
    """Record shares, rounded."""
    rounded = {case: round(share, 3) for case, share in shares.items()}
    path.write_text(json.dumps(rounded, indent=2) + "\n")


def main() -> int:
    parser = run_parser("quick", __doc__, patience=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--floors", type=Path, default=FLOORS)
    options = parser.parse_args()
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
    try:
        rows = run_cases(model, cases, plan, [])
    except EngineError as error:
        say(str(error))
        return SLOWER
    machine = machine.best(roofline.measure(threads, plan.quiet))
    floors = read_floors(options.floors)
    shares = {row.case.name: share_of_roofline(row, shape, machine) for row in rows}
    findings = [
        Finding(
            r.case.name,
            shares[r.case.name],
            machine.is_clean and r.repeated.is_clean,
            floors.get(r.case.name),
        )
        for r in rows
    ]
    print(f"{machine.text()}\n\n{case_table(rows, shape, machine)}\n")
    print("\n".join(finding.text for finding in findings))
    if options.record:
        write_floors(options.floors, shares)
        figures = {"roofline": machine.as_json(), "shares_of_roofline": shares}
        Record(
            bench="quick", title=f"{MODEL} shape", command=command("quick"), figures=figures
        ).write()
        return PASSED
    return verdict(findings)


if __name__ == "__main__":
    sys.exit(main())
