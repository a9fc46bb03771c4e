"""`python -m bench.quantized`: the same random weights in several formats on our server, and on peers, in turn.

Each of `--ours` is a format for our server, each of `--peers` one for a peer, as in `llama.cpp:q4_0.gguf`. Ratios are
to our server on bfloat16 weights.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from bench.comparison.plan import Plan
from bench.comparison.report import levels_json, over, rate
from bench.comparison.served import run_levels
from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.command_line import command, run_parser, say
from bench.harness.quiet import Quiet
from bench.harness.record import Record
from bench.harness.repeats import Repeated, figure, ratio_text
from bench.harness.server import RunningServer, ServerError
from bench.harness.tables import markdown
from bench.peers.engines import OURS
from bench.peers.servers import HELD, HELP, Server, servers_held_to
from bench.peers.worker import Limits
from bench.quantized.formats import BFLOAT16, FORMATS, ensure_format, file_bytes
from millrace.load.levels import closed, parse_level
from millrace.load.measurement import Measurement
from millrace_proto.cores import usable_cores

BASE = f"{OURS} {BFLOAT16}"
LEVELS = (
    closed(1, 16, 128, rounds=1),
    closed(8, 128, 128, rounds=1),
    closed(32, 128, 128, rounds=1),
    closed(1, 1024, 4, rounds=3),
)
TITLES = (
    "level",
    "server and format",
    "tok/s",
    "all",
    "over own bfloat16",
    "ms a token",
    "first token, ms",
    "own bfloat16's / its",
    "file, MB",
)


def server_of(
    name: str, model: str, flags: Sequence[str], instruction_set: str | None = None
) -> Server:
    """The server `engine:format` on the checkpoint `model` in that format.

    Raises ValueError for an engine that is unknown, or cannot be held to the instruction set.
    """
    engine, _, form = name.partition(":")
    servers = {server.name: server for server in servers_held_to(instruction_set)}
    if engine not in servers:
        held = f" held to {instruction_set}" if instruction_set else ""
        raise ValueError(f"{engine} is no server{held}; these are: {', '.join(servers)}")
    peer = servers[engine]
    path = ensure_format(model, form)

    def start(
        _: Path, limits: Limits, log: Path, given: Sequence[str]
    ) -> AbstractContextManager[RunningServer]:
        return peer.start(path, limits, log, (*flags, *given))

    return replace(peer, name=f"{engine} {form}", start=start)


def first_token(measurements: Sequence[Measurement], level: str, server: str) -> Repeated:
    """Milliseconds to the first token."""
    return over(measurements, level, server, lambda m: m.first_token_ms.p50)


def table(measurements: Sequence[Measurement], sizes: dict[str, int]) -> str:
    """Servers, level by level."""
    rows = []
    for level in dict.fromkeys(m.level for m in measurements):
        for server in dict.fromkeys(m.server for m in measurements if m.level == level):
            found, first = (each(measurements, level, server) for each in (rate, first_token))
            gap = over(measurements, level, server, lambda m: m.between_tokens_ms.p50)
            has_base = any((m.level, m.server) == (level, BASE) for m in measurements)
            base = rate(measurements, level, BASE) if has_base else None
            base_first = first_token(measurements, level, BASE) if has_base else None
            rows.append(
                (
                    level,
                    server,
                    found.text,
                    found.all_text(),
                    ratio_text(found, base),
                    figure(gap.median),
                    first.text,
                    ratio_text(base_first, first),
                    f"{sizes[server] / 1e6:.0f}",
                )
            )
    return markdown(TITLES, rows)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = run_parser("quantized", __doc__, patience=60.0)
    parser.add_argument("--model", choices=tuple(SHAPES), default="1b")
    parser.add_argument("--ours", nargs="+", choices=FORMATS, default=[BFLOAT16, *FORMATS[1:3]])
    parser.add_argument(
        "--peers", nargs="*", default=["llama.cpp:q4_0.gguf", "llama.cpp:q8_0.gguf"]
    )
    parser.add_argument("--flags", type=shlex.split, default=[], help="more, for our launcher")
    parser.add_argument("--levels", nargs="+", type=parse_level, default=list(LEVELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--instruction-set", choices=tuple(HELD), help=HELP)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> Record:
    """Measure every level on every server. Raises ServerError or ValueError when ours fails."""
    names = [*(f"{OURS}:{form}" for form in options.ours), *options.peers]
    servers = [
        server_of(name, options.model, options.flags, options.instruction_set) for name in names
    ]
    for name in (server.name for server in servers if not server.is_installed):
        say(f"{name} is not installed")
    plan = Plan(
        engines=(),
        repeats=options.repeats,
        threads=usable_cores(),
        quiet=Quiet(patience_seconds=options.patience),
        out=options.out,
        more_servers=[server for server in servers if server.is_installed],
    )
    notes: list[str] = []
    model = ensure_checkpoint(options.model)
    measurements = run_levels(model, options.levels, plan, notes)
    sizes = {
        name.replace(":", " "): file_bytes(ensure_format(options.model, name.partition(":")[2]))
        for name in names
    }
    record = Record(
        bench="quantized",
        title=f"Quantised weights, {options.model}",
        command=command("quantized"),
        figures={
            "file_bytes": sizes,
            "measurements": levels_json(measurements),
            "notes": notes,
        },
    )
    record.save(options.out / "quantized.json")
    lines = [table(measurements, sizes), *(f"Note: {note}" for note in notes)]
    print(record.text("\n\n".join(lines)))
    return record


def main() -> int:
    """Exit code 1 when ours did not run."""
    options = parse_arguments(sys.argv[1:])
    try:
        record = run(options)
    except (ServerError, ValueError) as error:
        print(error)
        return 1
    if options.record:
        record.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
