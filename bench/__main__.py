"""`python -m bench`: every case and load level on our engine and server, and on the installed peers.

It waits for a quiet machine before each measurement, takes turns, repeats, measures the roofline in the
same run, prints tables and writes JSON. `--record` writes the figures to bench/results.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.comparison import roofline
from bench.comparison.cases import CASES, DEFAULT_LEVELS
from bench.comparison.offline import run_cases
from bench.comparison.plan import Plan, installed
from bench.comparison.report import Results, text
from bench.comparison.served import run_levels
from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.paths import MODELS_FOLDER
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.harness.server import ServerError
from bench.peers.engines import OFFLINE, OURS, Offline, openvino_model
from bench.peers.process import EngineError
from bench.peers.revisions import at_revision
from bench.quantized.formats import ensure_format
from millrace.load.levels import parse_level
from millrace_proto.cores import usable_cores

PEERS = ("vllm", "openvino", "llama.cpp", "transformers")
KINDS = ("offline", "served")
OPENVINO_CODES = {
    "int4": ("int4", "--sym", "--group-size=128", "--ratio=1.0"),
    "int8": ("int8",),
}
"""Formats of weights for OpenVINO, with options of `optimum-cli`."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("", __doc__, patience=120.0)
    parser.add_argument("--model", nargs="+", default=list(CASES), choices=SHAPES, help="shapes")
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, help="engines without HTTP, or servers; both by default"
    )
    parser.add_argument("--cases", nargs="+", help="names of the offline cases to run")
    parser.add_argument(
        "--levels",
        nargs="+",
        type=parse_level,
        help="c8:128+64x2 is a closed loop of 8 clients, 2 requests each, 128 tokens in and 64 out;"
        " r4:128+64x100 is 100 requests that arrive at 4 a second; without --only, servers alone",
    )
    parser.add_argument("--peer", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument(
        "--codes",
        nargs="*",
        default=[],
        choices=tuple(OPENVINO_CODES),
        help="also run our engine and OpenVINO's on weights in these formats, without HTTP",
    )
    parser.add_argument(
        "--against",
        metavar="REVISION",
        nargs="*",
        default=[],
        help="serve earlier revisions of this repository in turn with this one",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--flags", type=shlex.split, default=[], help="more flags for our launcher, in one string"
    )
    parser.add_argument(
        "--shard-flags", type=shlex.split, default=[], help="the same for our engine without HTTP"
    )
    parser.add_argument("--models-folder", type=Path, default=MODELS_FOLDER)
    options = parser.parse_args(arguments)
    if options.only is None:
        options.only = ["served"] if options.levels and not options.cases else list(KINDS)
    return options


def engines_of_codes(name: str, codes: str) -> list[Offline]:
    """Our engine and OpenVINO's on the shape's weights as `codes`."""
    convert: dict[str, Callable[[Path], Path]] = {
        OURS: lambda _: ensure_format(name, f"compressed-{codes}"),
        "openvino": partial(openvino_model, weights=OPENVINO_CODES[codes]),
    }
    return [
        replace(engine, name=f"{engine.name} {codes}", convert=convert[engine.name])
        for engine in OFFLINE
        if engine.name in convert
    ]


def run_model(name: str, options: argparse.Namespace) -> Results:
    """Measure one shape. Raises EngineError, ServerError or ValueError when ours fails."""
    model = ensure_checkpoint(name, folder=options.models_folder)
    threads = usable_cores()
    plan = Plan(
        engines=installed([OURS, *options.peer]),
        repeats=options.repeats,
        threads=threads,
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
        launcher_flags=options.flags,
        shard_flags=options.shard_flags,
        more_offline=[
            engine for codes in options.codes for engine in engines_of_codes(name, codes)
        ],
        more_servers=[at_revision(revision) for revision in options.against],
    )
    say(f"{name}: {', '.join(plan.engines)}; measuring the roofline")
    results = Results(model=name, machine=roofline.measure(threads, plan.quiet))
    notes: list[str] = []
    if "offline" in options.only:
        cases = [c for c in CASES[name] if not options.cases or c.name in options.cases]
        results.rows = run_cases(model, cases, plan, notes) if cases else ()
    if "served" in options.only:
        levels = options.levels or DEFAULT_LEVELS[name]
        if levels:
            results.measurements = run_levels(model, levels, plan, notes)
    results.machine = results.machine.best(roofline.measure(threads, plan.quiet))
    results.notes = notes
    return results


def main() -> int:
    """Exit code 1 when ours did not run, or one of our requests failed."""
    options = parse_arguments(sys.argv[1:])
    failed = False
    for name in options.model:
        try:
            results = run_model(name, options)
        except (EngineError, ServerError, ValueError) as error:
            say(f"{name}: {error}")
            return 1
        record = Record(
            bench="comparison",
            title=f"{name} shape, CPU",
            command=command(""),
            figures=results.figures(),
        )
        record.save(options.out / f"{name}.json")
        print(f"\n{record.text(text(results))}", flush=True)
        if options.record:
            record.write()
        failed = failed or any(m.failures for m in results.measurements if m.server == OURS)
    print(f"Results and logs are in {options.out}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
