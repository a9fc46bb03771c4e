"""`python -m bench.speculation`: tokens per step and speed-up of guessing ahead, against the same server without.

Both servers run side by side, and have the same requests in turn; the other one is idle meanwhile. Every answer of
the two is compared. `--record` writes the table into its section of RESULTS.md. Exit code 1 where an answer differs,
or guessing costs more than a twentieth.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from bench import machine
from bench.plan import say
from bench.quiet import Quiet, wait_until_quiet
from bench.scheduling import sections
from bench.serve import ServerError
from bench.speculation.measure import (
    LEAST_RATIO,
    STREAMS,
    AnswersDifferError,
    Load,
    Row,
    run_load,
    servers,
    table,
    verdict,
)
from bench.speculation.texts import KINDS, MOST_TOKENS, NUM_PRECEDENTS

RESULTS = Path(__file__).parents[1] / "RESULTS.md"
DEMO = Path(__file__).parents[2] / "demo" / "model"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder")
    parser.add_argument(
        "--guess", type=shlex.split, default=["--speculate=4"], help="flags of the one that guesses"
    )
    parser.add_argument("--flags", type=shlex.split, default=[], help="more, for both")
    parser.add_argument("--streams", type=_numbers, default=STREAMS, help="with commas")
    parser.add_argument("--starts", type=int, default=3, help="of both servers anew")
    parser.add_argument(
        "--rounds", type=int, default=3, help="that count, after one, of each start"
    )
    parser.add_argument("--requests", type=int, default=8, help="of each stream in a round")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for a quiet machine"
    )
    parser.add_argument("--quick", action="store_true", help="hardly any; nothing to quote")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--record", action="store_true", help="write a section of RESULTS.md")
    options = parser.parse_args(arguments)
    if options.quick and options.record:
        parser.error("--quick measures nothing worth to --record")
    if options.quick:
        options.starts, options.rounds, options.requests = 1, 1, 2
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def measure(options: argparse.Namespace) -> list[Row]:
    """Every text with every number of streams; raises ServerError, AnswersDifferError or ClientError."""
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[Load, Row] = {}
    for start in range(options.starts):
        with servers(options.model, out=options.out, guess=options.guess, flags=options.flags) as (
            plain,
            guessing,
        ):
            if not wait_until_quiet(Quiet(patience_seconds=options.patience)):
                say("the machine is not quiet: what follows is marked as disturbed")
            for load in (Load(text, streams) for text in KINDS for streams in options.streams):
                row = run_load(
                    plain,
                    guessing,
                    load,
                    rounds=options.rounds,
                    requests_per_stream=options.requests,
                    start=start,
                )
                found[load] = found[load].joined(row) if load in found else row
                say(f"{load.name}: {row.speedup:.2f}")
    return list(found.values())


def section(rows: Sequence[Row], *, options: argparse.Namespace, command: str) -> str:
    """The table under a heading that says when, where and how it was taken."""
    facts = machine.describe()
    name = options.model.resolve()
    shown = "demo" if name == DEMO.resolve() else name.name
    return (
        f"## Guessing ahead ({shown}, {' '.join(options.guess)}, {datetime.now(UTC):%Y-%m-%d %H:%M})\n\n"
        f"`{command}` at commit {facts['commit']}, on {facts['cpu']} ({facts['cores']}), {facts['memory']},"
        f" torch {facts['torch']}, Python {facts['python']}.\n\n"
        f"Greedy answers of up to {MOST_TOKENS} tokens. Repetitive: the question and its answer, and {NUM_PRECEDENTS}"
        " other pairs, stand in the prompt before it is asked again. Plain: a question alone. Two servers side by side"
        f" have the same requests in turn, and are started anew {options.starts} times, as one that runs may stay"
        f" faster or slower than another by some percent. Rates are medians of {options.starts} x"
        f" {options.rounds} rounds of {options.requests} requests a stream, the speed-up is that of the ratios.\n\n"
        f"{table(rows)}\n\n{verdict(rows)}\n"
    )


def main() -> int:
    """Measure; 1 when guessing has changed something or is too slow."""
    options = parse_arguments(sys.argv[1:])
    command = shlex.join(["python", "-m", "bench.speculation", *sys.argv[1:]])
    try:
        rows = measure(options)
    except (ServerError, AnswersDifferError, aiohttp.ClientError) as error:
        say(str(error))
        return 1
    text = section(rows, options=options, command=command)
    print(f"\n{text}", flush=True)
    if options.record:
        key = f"{options.model.resolve().parent.name} {' '.join(options.guess)}"
        sections.record(text, RESULTS, key=key, topic="speculation")
    return int(min(row.speedup for row in rows) < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
