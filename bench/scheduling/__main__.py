"""`python -m bench.scheduling`: prefix cache, chunking, KV growth, fairness, predictions, simulator, planner and more.

Each part starts our launcher with the flags that it compares, sends its load and prints a table; `planner`, `forecasts`
and `speed` need no server. `--record` writes
each table into its own section of RESULTS.md, in place of the one before it. `--quick` only shows that all runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench import machine
from bench.checkpoints import MODELS_FOLDER, SHAPES, ensure_checkpoint
from bench.parts import parts_parser
from bench.plan import say
from bench.quiet import Quiet
from bench.scheduling import (
    chunking,
    forecasts,
    planner,
    predictions,
    prefix,
    reservation,
    sections,
    simulator,
    speed,
    tenants,
)
from bench.scheduling.client import RequestsFailed
from bench.scheduling.lab import Lab
from bench.scheduling.part import Question
from bench.scheduling.simulated import SimulationFailed
from bench.scheduling.simulator import LogLags
from bench.scheduling.texts import Texts
from bench.serve import ServerError

PARTS = {
    module.PART.name: module.PART
    for module in (
        prefix,
        chunking,
        reservation,
        tenants,
        predictions,
        simulator,
        planner,
        forecasts,
        speed,
    )
}
RESULTS = Path(__file__).parents[1] / "RESULTS.md"
DEMO = Path(__file__).parents[2] / "demo" / "model"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = parts_parser("python -m bench.scheduling", __doc__, PARTS)
    parser.add_argument("--model", default="135m", choices=(*SHAPES, "demo"))
    parser.add_argument("--repeats", type=int, default=1, help="a figure is their median")
    parser.add_argument("--quick", action="store_true", help="fewer requests; nothing to quote")
    options = parser.parse_args(arguments)
    if options.quick and options.record:
        parser.error("--quick measures nothing worth to --record")
    return options


def lab_from(options: argparse.Namespace) -> Lab:
    """The model, written first where it is missing, and everything that parts share."""
    model = (
        DEMO if options.model == "demo" else ensure_checkpoint(options.model, folder=MODELS_FOLDER)
    )
    config = json.loads((model / "config.json").read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    return Lab(
        model=model,
        texts=Texts.of(model),
        most_positions=config["max_position_embeddings"],
        quick=options.quick,
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
        flags=options.flags,
    )


def section(part: Question, text: str, *, model: str, command: str) -> str:
    """A table under a heading that says when and where it was taken."""
    facts = machine.describe()
    return (
        f"## {part.title} ({model}, {datetime.now(UTC):%Y-%m-%d %H:%M})\n\n"
        f"`{command}` at commit {facts['commit']}, on {facts['cpu']} ({facts['cores']}), {facts['memory']},"
        f" torch {facts['torch']}, Python {facts['python']}.\n\n{text}\n"
    )


def main() -> int:
    """Measure part by part; 1 when one of them could not be."""
    options = parse_arguments(sys.argv[1:])
    lab, failed = lab_from(options), False
    command = shlex.join(["python", "-m", "bench.scheduling", *sys.argv[1:]])
    for name in options.only:
        part = PARTS[name]
        say(f"{name}: {', '.join(case.name for case in part.cases)}")
        try:
            table = part.measure(lab, repeats=options.repeats)
        except (ServerError, RequestsFailed, SimulationFailed, LogLags) as error:
            say(f"{name}: {error}")
            failed = True
            continue
        text = section(part, part.text(table), model=options.model, command=command)
        print(f"\n{text}", flush=True)
        if options.record:
            sections.record(text, RESULTS, key=f"{name} {options.model}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
