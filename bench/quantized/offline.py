"""`python -m bench.quantized.offline`: weights of 4 and 8 bits without HTTP, in turns with OpenVINO's.

All engines start from the same random weights. Ratios are to our engine on bfloat16 weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.comparison.cases import Case, Figure
from bench.comparison.offline import Row, run_cases
from bench.comparison.plan import FAILURES, Plan
from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.command_line import command, run_parser
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.harness.repeats import ratio_text
from bench.harness.tables import markdown
from bench.peers.engines import OFFLINE, OURS, SHARD_FLAGS, Offline, openvino_model
from bench.quantized.formats import ensure_format
from millrace_launcher.host.threads import usable_cores

CASES = {
    "one": Case("one stream", Figure.PER_TOKEN, ((16, 64),)),
    "8": Case("8 of 128+128", Figure.RATE, ((128, 128),) * 8),
    "32": Case("32 of 128+128", Figure.RATE, ((128, 128),) * 32),
    "first": Case("first of 1024", Figure.FIRST_TOKEN, ((1024, 1),)),
}
ACTIVATIONS = ("exact", "int8")
OPENVINO_WEIGHTS = {
    "int4": ("int4", "--sym", "--group-size=128", "--ratio=1.0"),
    "int8": ("int8",),
}


def engines(model: str, kinds: Sequence[str] = ACTIVATIONS) -> list[Offline]:
    """Ours and OpenVINO's in each format; ours multiplies codes with each kind of activations."""
    found = {offline.name: offline for offline in OFFLINE}
    ours, openvino = found[OURS], found["openvino"]

    def stored(form: str, activations: str) -> Offline:
        flags = {**ours.environment(), SHARD_FLAGS: f"--quantize-activations={activations}"}
        return replace(
            ours,
            name=f"{OURS} {form} {activations}",
            environment=lambda: flags,
            convert=lambda _: ensure_format(model, f"compressed-{form}"),
        )

    return [
        *(stored(form, activations) for form in ("int4", "int8") for activations in kinds),
        *(
            replace(openvino, name=f"openvino {form}", convert=partial(_openvino, weights=weights))
            for form, weights in OPENVINO_WEIGHTS.items()
        ),
    ]


def _openvino(model: Path, weights: Sequence[str]) -> Path:
    return openvino_model(model, weights)


def table(rows: Sequence[Row]) -> str:
    """Engines, case by case."""
    base = {row.case.name: row.repeated for row in rows if row.engine == OURS}
    lines = []
    for row in sorted(rows, key=lambda row: list(base).index(row.case.name)):
        pair = (base[row.case.name], row.repeated)
        ratio = ratio_text(*reversed(pair))
        lines.append(
            (
                row.case.name,
                row.engine,
                row.case.figure.value,
                row.repeated.text,
                row.repeated.all_text(),
                ratio,
            )
        )
    return markdown(("case", "engine", "unit", "median", "all", "over own bfloat16"), lines)


def main() -> int:
    """Exit code 1 when ours does not run on bfloat16 weights."""
    parser = run_parser("quantized-offline", __doc__, patience=60.0)
    parser.add_argument("--model", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=ACTIVATIONS)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    plan = Plan(
        engines=(OURS,),
        more_engines=engines(options.model, options.activations),
        repeats=options.repeats,
        threads=usable_cores(),
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
    )
    notes: list[str] = []
    try:
        chosen = [CASES[name] for name in options.cases]
        rows = run_cases(ensure_checkpoint(options.model), chosen, plan, notes)
    except FAILURES as error:
        print(error)
        return 1
    text = "\n\n".join([table(rows), *(f"Note: {note}" for note in notes)])
    record = Record(
        bench="quantized-offline",
        title=f"Quantised weights without HTTP, {options.model}",
        command=command("quantized.offline"),
        figures={"rows": [(row.case.name, row.engine, row.repeated.as_json()) for row in rows]},
    )
    record.save(options.out / "quantized-offline.json")
    print(record.text(text))
    if options.record:
        record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
