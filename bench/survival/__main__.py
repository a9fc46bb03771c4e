"""`python -m bench.survival`: what killed, hung and poisoned shards cost clients, and a soak.

Each part starts our launcher on the demo model, harms it while requests run and compares every answer with an
undisturbed run. `--record` writes what was found into a section of RESULTS.md, in place of the one before it.
Exit code 1 where something was lost.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import aiohttp

from bench import machine
from bench.parts import parts_parser
from bench.plan import say
from bench.quiet import Quiet
from bench.scheduling import sections
from bench.serve import ServerError
from bench.survival import kills, overload, poison, soak
from bench.survival.deployment import NoShard
from bench.survival.lab import Lab, Part, Report

PARTS = {
    part.name: part
    for part in (kills.KILLS, kills.RANKS, kills.HANG, poison.PART, overload.PART, soak.PART)
}
RESULTS = Path(__file__).parents[1] / "RESULTS.md"
DEMO = Path(__file__).parents[2] / "demo" / "model"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = parts_parser("python -m bench.survival", __doc__, PARTS)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the numbers of streams and kills; not to quote"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    parser.add_argument("--seed", default="survival", help="of the moments at which blows fall")
    options = parser.parse_args(arguments)
    if options.scale < 1 and options.record:
        parser.error("a run with --scale below 1 measures nothing worth to --record")
    return options


def section(part: Part, report: Report, *, command: str) -> str:
    """What a part found, under a heading that says when and where."""
    facts = machine.describe()
    return (
        f"## {part.title} ({datetime.now(UTC):%Y-%m-%d %H:%M})\n\n"
        f"`{command}` at commit {facts['commit']}, on {facts['cpu']} ({facts['cores']}), {facts['memory']},"
        f" torch {facts['torch']}, Python {facts['python']}.\n\n{report.text}\n"
    )


def main() -> int:
    """Part by part; 1 where something was lost, or could not be shown."""
    options = parse_arguments(sys.argv[1:])
    signal.signal(signal.SIGTERM, _on_sigterm)
    options.out.mkdir(parents=True, exist_ok=True)
    lab = Lab(
        model=options.model.resolve(),
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
        scale=options.scale,
        minutes=options.minutes,
        seed=options.seed,
        flags=options.flags,
    )
    command = shlex.join(["python", "-m", "bench.survival", *sys.argv[1:]])
    failed = False
    for name in options.only:
        part = PARTS[name]
        say(f"{name}: {part.title}")
        try:
            report = part.run(lab)
        except (ServerError, NoShard, aiohttp.ClientError, ExceptionGroup) as error:
            say(f"{name}: {str(error)[-2000:]}")
            failed = True
            continue
        failed |= bool(report.problems)
        lab.write(name, {**report.data, "problems": report.problems})
        text = section(part, report, command=command)
        print(f"\n{text}", flush=True)
        if options.record:
            sections.record(text, RESULTS, key=name, topic="survival")
    return 1 if failed else 0


def _on_sigterm(_number: int, _frame: FrameType | None) -> NoReturn:
    """End like on Ctrl-C, so that no server is left behind."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
