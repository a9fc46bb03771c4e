"""The command line of a benchmark that is made of parts, and their run."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence

from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.paths import DEMO, IMAGES_FOLDER
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.harness.server import ServerError
from bench.parts.client import RequestsFailed
from bench.parts.fixture import Fixture
from bench.parts.part import Question, as_json
from bench.parts.texts import Texts


def parse_arguments(
    name: str,
    description: str | None,
    parts: Mapping[str, Question],
    arguments: Sequence[str],
    *,
    model: str,
    repeats: int = 1,
) -> argparse.Namespace:
    """The command line of `bench.NAME`; argparse ends the program on a bad one. `model` and `repeats` are defaults."""

    def chosen(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(parts)):
            raise argparse.ArgumentTypeError(
                f"no part {', '.join(unknown)}; there are {list(parts)}"
            )
        return names

    parser = run_parser(name, description)
    parser.add_argument("--only", type=chosen, default=list(parts), help="parts, with commas")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more, for every launcher")
    parser.add_argument("--model", default=model, choices=(*SHAPES, "demo"))
    parser.add_argument("--repeats", type=int, default=repeats, help="a figure is their median")
    parser.add_argument("--quick", action="store_true", help="fewer requests; nothing to quote")
    options = parser.parse_args(arguments)
    if options.quick and options.record:
        parser.error("--quick measures nothing worth to --record")
    return options


def fixture_from(options: argparse.Namespace) -> Fixture:
    """The setting of all parts; writes a missing model first."""
    model = DEMO if options.model == "demo" else ensure_checkpoint(options.model)
    config = json.loads((model / "config.json").read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    return Fixture(
        model=model,
        texts=Texts.of(model),
        most_positions=config["max_position_embeddings"],
        quick=options.quick,
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
        flags=options.flags,
    )


def run_parts(
    name: str,
    parts: Mapping[str, Question],
    options: argparse.Namespace,
    *failures: type[Exception],
) -> int:
    """Measure part by part; 1 when one of them raised ServerError, RequestsFailed or one of `failures`."""
    fixture, failed = fixture_from(options), False
    expected: tuple[type[Exception], ...] = (ServerError, RequestsFailed, *failures)
    for chosen in options.only:
        part = parts[chosen]
        say(f"{chosen}: {', '.join(case.name for case in part.cases)}")
        try:
            table = part.measure(fixture, repeats=options.repeats)
        except expected as error:
            say(f"{chosen}: {error}")
            failed = True
            continue
        record = Record(
            bench=name,
            title=f"{part.title}, {options.model}",
            command=command(name),
            figures={
                "method": part.method,
                "cases": as_json(table),
                "conclusions": [*part.conclude(table)],
            },
        )
        print(f"\n{record.text(part.text(table))}", flush=True)
        if part.chart is not None:
            where = f"{record.title}, {record.machine['cpu']} ({record.machine['cores']})"
            folder = IMAGES_FOLDER if options.record else options.out
            (folder / f"{name}-{chosen}.svg").write_text(part.chart(where, table))
        if options.record:
            record.write()
    return 1 if failed else 0
