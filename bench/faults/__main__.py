"""`python -m bench.faults`: the cost of killed, hung and poisoned shards to clients, overload, and a soak.

Each part starts our launcher on the demo model, breaks it while requests run and compares every answer with an
undisturbed run. `--record` writes the figures to bench/results. Exit code 1 where an answer was lost or wrong.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import aiohttp

from bench.faults import overload, poison, soak
from bench.faults.deployment import NoShard
from bench.faults.fixture import Fixture
from bench.faults.kills import kills, model_kills
from bench.harness.command_line import command, parts_parser, say
from bench.harness.paths import DEMO
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.harness.server import ServerError

PARTS = {
    part.name: part
    for part in (
        kills.KILLS,
        kills.RANKS,
        kills.HANG,
        model_kills.PART,
        poison.PART,
        overload.PART,
        soak.PART,
    )
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = parts_parser("faults", __doc__, PARTS)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the numbers of streams and kills; not to quote"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    parser.add_argument("--seed", default="faults", help="of the moments at which signals are sent")
    options = parser.parse_args(arguments)
    if options.scale < 1 and options.record:
        parser.error("a run with --scale below 1 measures nothing worth to --record")
    return options


def main() -> int:
    """Part by part; 1 where an answer was lost or wrong, or a part could not run."""
    options = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, _on_sigterm)
    options.out.mkdir(parents=True, exist_ok=True)
    fixture = Fixture(
        model=options.model.resolve(),
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
        scale=options.scale,
        minutes=options.minutes,
        seed=options.seed,
        flags=options.flags,
    )
    failed = False
    for name in options.only:
        part = PARTS[name]
        say(f"{name}: {part.title}")
        try:
            report = part.run(fixture)
        except (ServerError, NoShard, aiohttp.ClientError, ExceptionGroup) as error:
            say(f"{name}: {str(error)[-2000:]}")
            failed = True
            continue
        failed |= bool(report.problems)
        fixture.write(name, {**report.data, "problems": report.problems})
        record = Record(
            bench="faults",
            title=part.title,
            command=command("faults"),
            figures={**report.data, "problems": report.problems},
            other_cores=report.other_cores,
        )
        print(f"\n{record.text(report.text)}", flush=True)
        if options.record:
            record.write()
    return 1 if failed else 0


def _on_sigterm(_number: int, _frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, so that every server is stopped."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
