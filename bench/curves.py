"""`python -m bench.curves`: throughput against concurrency, and decoding against context length.

Engines without HTTP, in turn on the same requests. Writes `<out>/<model>-curves.json` and `.svg`; `--record` writes
the figures to bench/results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.comparison import roofline
from bench.comparison.cases import Case, Figure
from bench.comparison.offline import Row, run_cases
from bench.comparison.plan import Plan, installed
from bench.comparison.roofline import Machine
from bench.harness.checkpoints import MAX_POSITIONS, SHAPES, Shape, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.paths import MODELS_FOLDER
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.harness.repeats import figure
from bench.harness.tables import markdown
from bench.peers.engines import OURS
from bench.peers.process import EngineError
from millrace.charts.lines import Panel, curves
from millrace_launcher.host.threads import usable_cores

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
PROMPT_TOKENS = 128
NEW_TOKENS = 32
CONTEXT_STEPS = 64
PEERS = ("vllm", "openvino", "transformers")


def concurrency_case(streams: int) -> Case:
    """The case of `streams` requests at once."""
    lengths = ((PROMPT_TOKENS, NEW_TOKENS),) * streams
    return Case(f"c={streams} {PROMPT_TOKENS}+{NEW_TOKENS}", Figure.RATE, lengths)


def context_case(context: int, streams: int) -> Case:
    """The case of streams that end at a context of `context` tokens; only their joint decoding counts."""
    new_tokens = min(CONTEXT_STEPS, context // 2)
    prompt_tokens = min(context, MAX_POSITIONS - 1) - new_tokens
    return Case(f"context {context}", Figure.DECODE_RATE, ((prompt_tokens, new_tokens),) * streams)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("curves", __doc__, patience=120.0)
    parser.add_argument("--model", default="135m", choices=SHAPES)
    parser.add_argument("--peer", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--concurrency", nargs="*", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--context", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--streams", type=int, default=4, help="of the curve over the context")
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args(arguments)


def points_of(
    rows: Sequence[Row], cases: dict[int, Case], shape: Shape, measured: Machine
) -> dict[str, list[tuple[float, float]]]:
    """(x, median) by engine, and the roofline as a separate series."""
    points: dict[str, list[tuple[float, float]]] = {}
    for x, case in cases.items():
        for row in rows:
            if row.case.name == case.name:
                points.setdefault(row.engine, []).append((float(x), row.repeated.median))
    points["roofline"] = [(float(x), case.floor(shape, measured)) for x, case in cases.items()]
    return points


def table(rows: Sequence[Row], cases: dict[int, Case], shape: Shape, measured: Machine) -> str:
    """A row for each point, a column for each engine."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    found = {(row.case.name, row.engine): row.repeated.text for row in rows}
    lines = [
        [
            case.name,
            *(found.get((case.name, e), "") for e in engines),
            figure(case.floor(shape, measured)),
        ]
        for case in cases.values()
    ]
    return markdown(["tok/s", *engines, "roofline"], lines)


def text(tables: Sequence[str], notes: Sequence[str], measured: Machine) -> str:
    """The roofline, both tables and notes."""
    return "\n\n".join(
        [
            f"In the same run: {measured.text()}. The first table: throughput over requests at once. The second: joint"
            " decoding of streams that end at a context of this many tokens.",
            *tables,
            *(f"Note: {note}" for note in notes),
        ]
    )


def main() -> int:
    """Measure, draw, print."""
    options = parse_arguments(sys.argv[1:])
    shape, threads = SHAPES[options.model], usable_cores()
    model = ensure_checkpoint(options.model, folder=MODELS_FOLDER)
    plan = Plan(
        engines=installed([OURS, *options.peer]),
        repeats=options.repeats,
        threads=threads,
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
    )
    by_streams = {c: concurrency_case(c) for c in sorted(options.concurrency)}
    by_context = {n: context_case(n, options.streams) for n in sorted(options.context)}
    measured = roofline.measure(threads, plan.quiet)
    notes: list[str] = []
    try:
        # In two runs, so that a peer without long contexts still has the first curve.
        rows = run_cases(model, list(by_streams.values()), plan, notes) if by_streams else []
        rows += run_cases(model, list(by_context.values()), plan, notes) if by_context else []
    except (EngineError, ValueError) as error:
        say(str(error))
        return 1
    measured = measured.best(roofline.measure(threads, plan.quiet))
    record = _record(options, rows, measured, notes)
    record.save(options.out / f"{options.model}-curves.json")
    where = f"{options.model}, bfloat16, on {record.machine['cpu']} ({record.machine['cores']})"
    panels = [
        Panel(
            title=f"Output tokens per second, {PROMPT_TOKENS} tokens in and {NEW_TOKENS} out",
            points=points_of(rows, by_streams, shape, measured),
            x_title="requests at once",
            doubles=True,
        ),
        Panel(
            title=f"Decoded tokens per second of {options.streams} streams",
            points=points_of(rows, by_context, shape, measured),
            x_title="context, tokens",
            doubles=True,
        ),
    ]
    (options.out / f"{options.model}-curves.svg").write_text(curves(where, panels))
    tables = [table(rows, cases, shape, measured) for cases in (by_streams, by_context) if cases]
    print("\n" + record.text(text(tables, notes, measured)))
    if options.record:
        record.write()
    return 0


def _record(
    options: argparse.Namespace, rows: Sequence[Row], measured: Machine, notes: list[str]
) -> Record:
    return Record(
        bench="curves",
        title=f"curves of the {options.model} shape, CPU",
        command=command("curves"),
        figures={
            "roofline": measured.as_json(),
            "points": [
                {
                    "case": row.case.name,
                    "engine": row.engine,
                    **row.repeated.as_json(),
                }
                for row in rows
            ],
            "notes": notes,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
