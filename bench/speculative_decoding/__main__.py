"""`python -m bench.speculative_decoding`: tokens per step and speed-up, against the same server without draft tokens.

Both servers run side by side and get the same requests in turn, while the other one is idle. All answers of the two
are compared. `--record` writes the figures to bench/results. Exit code 1 where an answer differs, or where
speculative decoding is slower by more than a twentieth.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.harness.client import FAILURES
from bench.harness.command_line import command, run_parser, say
from bench.harness.paths import DEMO
from bench.harness.quiet import Quiet, wait_until_quiet
from bench.harness.record import Record
from bench.harness.server import ServerError
from bench.speculative_decoding.measure import (
    KINDS,
    LEAST_RATIO,
    MOST_TOKENS,
    NUM_PRECEDENTS,
    STREAMS,
    AnswersDifferError,
    Load,
    Row,
    run_load,
    servers,
    table,
    verdict,
)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("speculative_decoding", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder")
    parser.add_argument(
        "--draft-flags",
        type=shlex.split,
        default=["--speculate=4"],
        help="flags of the server that decodes speculatively",
    )
    parser.add_argument("--flags", type=shlex.split, default=[], help="more, for both")
    parser.add_argument("--streams", type=_numbers, default=STREAMS, help="with commas")
    parser.add_argument("--starts", type=int, default=3, help="of both servers anew")
    parser.add_argument(
        "--rounds", type=int, default=3, help="that count, after one, of each start"
    )
    parser.add_argument("--requests", type=int, default=8, help="of each stream in a round")
    parser.add_argument("--quick", action="store_true", help="hardly any; nothing to quote")
    options = parser.parse_args(arguments)
    if options.quick and options.record:
        parser.error("--quick measures nothing worth to --record")
    if options.quick:
        options.starts, options.rounds, options.requests = 1, 1, 2
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure every text with every number of streams; raises ServerError, AnswersDifferError or one of FAILURES."""
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[Load, Row] = {}
    for start in range(options.starts):
        with servers(
            options.model, out=options.out, draft_flags=options.draft_flags, flags=options.flags
        ) as (
            plain,
            speculative,
        ):
            if not wait_until_quiet(Quiet(patience_seconds=options.patience)):
                say("the machine is not quiet: the following figures are marked as disturbed")
            for load in (Load(text, streams) for text in KINDS for streams in options.streams):
                row = run_load(
                    plain,
                    speculative,
                    load,
                    rounds=options.rounds,
                    requests_per_stream=options.requests,
                    start=start,
                )
                found[load] = found[load].joined(row) if load in found else row
                say(f"{load.name}: {row.speedup:.2f}")
    return list(found.values())


def text(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """Method, table and verdict."""
    return (
        f"Greedy answers of up to {MOST_TOKENS} tokens. Repetitive: the prompt holds the question with its answer and"
        f" {NUM_PRECEDENTS} other pairs, and asks the question again. Plain: a question alone. Two servers side by side"
        f" get the same requests in turn. Both are started {options.starts} times, because one running server may be"
        f" faster than another by some percent. Rates are medians of {options.starts} x {options.rounds} rounds of"
        f" {options.requests} requests a stream; the speed-up is the median of the ratios.\n\n"
        f"{table(rows)}\n\n{verdict(rows)}"
    )


def main() -> int:
    """Exit code 1 when draft tokens changed an answer or are too slow."""
    options = parse_arguments(sys.argv[1:])
    try:
        rows = measure(options)
    except (ServerError, AnswersDifferError, *FAILURES, ExceptionGroup) as error:
        say(str(error))
        return 1
    folder = options.model.resolve()
    name = "demo" if folder == DEMO else folder.name
    record = Record(
        bench="speculative_decoding",
        title=f"{name}, {' '.join(options.draft_flags)}",
        command=command("speculative_decoding"),
        figures=[row.as_json() for row in rows],
    )
    print(f"\n{record.text(text(rows, options))}", flush=True)
    if options.record:
        record.write()
    return int(min(row.speedup for row in rows) < LEAST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
