"""`python -m bench.sampling`: milliseconds of the sampler at 128 rows of 128 000 scores, by sampling parameters.

`--against FOLDER` measures the sampler of another checkout too (its `shard` folder), in turn with ours. `--step` adds
a whole step of a 1B model, for the share of sampling in it. `--record` writes the figures to bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.harness.command_line import command, run_parser
from bench.harness.paths import ROOT
from bench.harness.quiet import Quiet, wait_until_quiet
from bench.harness.record import Record
from bench.sampling.cases import CASES
from bench.sampling.worker import STEP

Times = dict[str, list[float]]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("sampling", __doc__)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--rounds", type=int, default=5, help="calls of each case in each repeat")
    parser.add_argument("--repeats", type=int, default=2, help="processes, in turn")
    parser.add_argument(
        "--threads", type=int, default=1, help="1 counts CPU time, more the clock's"
    )
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--against", type=Path, help="another checkout's shard folder")
    parser.add_argument("--step", action="store_true", help="time a step of a 1B model as well")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, names: list[str], *, shard: Path | None) -> Times:
    """Times of one process with our sampler, or with that in `shard`."""
    places = [str(shard)] if shard is not None else []
    paths = [*places, str(ROOT), os.environ.get("PYTHONPATH", "")]
    numbers = {name: str(getattr(options, name)) for name in ("rows", "vocab", "rounds", "threads")}
    flags = [part for name, value in numbers.items() for part in (f"--{name}", value)]
    answer = subprocess.run(
        [sys.executable, "-m", "bench.sampling.worker", "--names", json.dumps(names), *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(answer.stderr)
    found: Times = json.loads(answer.stdout)
    return found


def table(ours: Mapping[str, list[float]], theirs: Mapping[str, list[float]]) -> str:
    """A line for each case: medians, ranges, and the share of a step if known."""
    step = statistics.median(ours[STEP]) if STEP in ours else None
    head = ["case", "ms", "range"]
    head += ["before, ms", "range", "before / now"] if theirs else []
    head += ["share of a 1B step"] if step else []
    lines = [_line(head), _line(["---", *("--:" for _ in head[1:])])]
    for name, found in ours.items():
        middle = statistics.median(found)
        cells = [name, f"{middle:.1f}", _range(found)]
        if theirs:
            before = theirs.get(name)
            other = statistics.median(before) if before else 0.0
            cells += (
                [f"{other:.1f}", _range(before), f"{other / middle:.1f}"] if before else [""] * 3
            )
        if step:
            cells.append("" if name == STEP else f"{100 * middle / (step + middle):.0f} %")
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _range(found: Sequence[float]) -> str:
    return f"{min(found):.1f} to {max(found):.1f}"


def method(options: argparse.Namespace, *, was_quiet: bool) -> str:
    """The method of the table."""
    clock = (
        "CPU time of one thread"
        if options.threads == 1
        else f"wall time of {options.threads} threads"
    )
    noise = "" if was_quiet else " Other processes used the machine meanwhile."
    return (
        f"{options.rows} rows, vocabulary {options.vocab}, {clock}, medians of"
        f" {options.repeats} x {options.rounds} calls.{noise}"
    )


def main() -> int:
    """Measure in turn, print, record."""
    options = parse_arguments(sys.argv[1:])
    was_quiet = wait_until_quiet(Quiet(patience_seconds=options.patience))
    ours: Times = {}
    theirs: Times = {}
    for _ in range(options.repeats):
        names = [*options.only, *([STEP] if options.step else [])]
        for name, found in measure(options, names, shard=None).items():
            ours.setdefault(name, []).extend(found)
        if options.against is not None:
            for name, found in measure(options, options.only, shard=options.against).items():
                theirs.setdefault(name, []).extend(found)
    shown = ["FOLDER" if part == str(options.against) else part for part in sys.argv[1:]]
    record = Record(
        bench="sampling",
        title="share of a step" if options.step else f"sampler, {options.threads} threads",
        command=command("sampling", shown),
        figures={"was_quiet": was_quiet, "ours_ms": ours, "theirs_ms": theirs},
    )
    print(record.text(f"{method(options, was_quiet=was_quiet)}\n\n{table(ours, theirs)}"))
    if options.record:
        record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
