"""`python -m bench.curves`: throughput against concurrency, and decoding against context length.

Engines without HTTP, in turn on the same requests. Writes `<out>/<model>-curves.json` and `.svg`; `--record` adds a
dated section to RESULTS.md and puts the picture beside it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import machine, record, roofline
from bench.cases import Case, Figure
from bench.checkpoints import MAX_POSITIONS, MODELS_FOLDER, SHAPES, Shape, ensure_checkpoint
from bench.engines.process import EngineError
from bench.lines import Panel, curves
from bench.offline import Row, run_cases
from bench.peers import OURS
from bench.plan import Plan, installed, say
from bench.quiet import Quiet
from bench.repeats import figure
from bench.report import markdown
from bench.roofline import Machine
from millrace_launcher.settings.threads import usable_cores

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
PROMPT_TOKENS = 128
NEW_TOKENS = 32
CONTEXT_STEPS = 64
PEERS = ("vllm", "openvino", "transformers")
RESULTS = Path(__file__).parent / "RESULTS.md"


def concurrency_case(streams: int) -> Case:
    """So many requests at once."""
    lengths = ((PROMPT_TOKENS, NEW_TOKENS),) * streams
    return Case(f"c={streams} {PROMPT_TOKENS}+{NEW_TOKENS}", Figure.RATE, lengths)


def context_case(context: int, streams: int) -> Case:
    """Streams that end at a context of so many tokens; only their joint decoding counts."""
    new_tokens = min(CONTEXT_STEPS, context // 2)
    prompt_tokens = min(context, MAX_POSITIONS - 1) - new_tokens
    return Case(f"context {context}", Figure.DECODE_RATE, ((prompt_tokens, new_tokens),) * streams)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = argparse.ArgumentParser(prog="python -m bench.curves", description=__doc__)
    parser.add_argument("--model", default="135m", choices=SHAPES)
    parser.add_argument("--peer", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--concurrency", nargs="*", type=int, default=list(CONCURRENCIES))
    parser.add_argument("--context", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--streams", type=int, default=4, help="of the curve over the context")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--record", action="store_true", help="add a section to bench/RESULTS.md")
    return parser.parse_args(arguments)


def points_of(
    rows: Sequence[Row], cases: dict[int, Case], shape: Shape, measured: Machine
) -> dict[str, list[tuple[float, float]]]:
    """(x, median) by engine, and the roofline as a series of its own."""
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


def section(model: str, tables: Sequence[str], notes: Sequence[str], measured: Machine) -> str:
    """The dated section of RESULTS.md."""
    facts = machine.describe()
    command = shlex.join(["python", "-m", "bench.curves", *sys.argv[1:]])
    parts = [
        f"## {datetime.now(UTC):%Y-%m-%d %H:%M}, curves of the {model} shape, CPU",
        f"`{command}` at commit {facts['commit']}, on {facts['cpu']} ({facts['cores']}), {facts['memory']},"
        f" torch {facts['torch']}, transformers {facts['transformers']}, Python {facts['python']}. In the same run:"
        f" {measured.text()}.",
        f"Engines without HTTP, drawn in [{model}-curves.svg]({model}-curves.svg): so many requests at once, then the"
        " joint decoding of streams that end at a context of so many tokens.",
        *tables,
        *(f"Note: {note}" for note in notes),
    ]
    return "\n\n".join(parts) + "\n"


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
        # Apart, so that a peer that cannot do long contexts still has its other curve.
        rows = run_cases(model, list(by_streams.values()), plan, notes) if by_streams else []
        rows += run_cases(model, list(by_context.values()), plan, notes) if by_context else []
    except (EngineError, ValueError) as error:
        say(str(error))
        return 1
    measured = measured.best(roofline.measure(threads, plan.quiet))
    facts = machine.describe()
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
    where = f"{options.model}, bfloat16, on {facts['cpu']} ({facts['cores']})"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.model}-curves.svg").write_text(curves(where, panels))
    samples = [
        {
            "case": row.case.name,
            "engine": row.engine,
            "samples": [[s.value, s.other_cores] for s in row.samples],
        }
        for row in rows
    ]
    content = {"machine": facts, "roofline": measured.as_json(), "points": samples, "notes": notes}
    (options.out / f"{options.model}-curves.json").write_text(json.dumps(content, indent=2) + "\n")
    tables = [table(rows, cases, shape, measured) for cases in (by_streams, by_context) if cases]
    text = section(options.model, tables, notes, measured)
    print(f"\n{text}")
    if options.record:
        picture = f"{options.model}-curves.svg"
        (RESULTS.parent / picture).write_text((options.out / picture).read_text())
        record.append(text, RESULTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
