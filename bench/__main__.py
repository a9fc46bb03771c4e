"""`python -m bench`: run the levels on our server and its peers, print, write JSON and SVG."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import machine, plot, report, serve, transformers_cb
from bench.checkpoints import MODELS_FOLDER, SHAPES, ensure_checkpoint
from bench.levels import DEFAULT_LEVELS, Level, parse_level
from bench.measurement import Measurement

DEFAULT_MODELS = ("135m", "1b")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--model", nargs="+", default=DEFAULT_MODELS, choices=SHAPES, help="shapes to measure"
    )
    parser.add_argument(
        "--levels",
        nargs="+",
        type=parse_level,
        help="c8:128+64x2 is a closed loop of 8 clients, 2 requests each, 128 tokens in and 64 out;"
        " r4:128+64x100 is 100 requests that arrive at 4 a second",
    )
    parser.add_argument("--peer", nargs="*", default=["transformers"], choices=["transformers"])
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument(
        "--flags", type=shlex.split, default=[], help="more flags for our launcher, in one string"
    )
    parser.add_argument("--models-folder", type=Path, default=MODELS_FOLDER)
    return parser.parse_args(arguments)


def run_model(name: str, options: argparse.Namespace) -> list[Measurement]:
    """Our server first, then each peer, alone on the machine; open loops are for servers only."""
    model = ensure_checkpoint(name, folder=options.models_folder)
    levels: Sequence[Level] = options.levels or DEFAULT_LEVELS[name]
    print(f"{name}: millrace, {len(levels)} levels ...", file=sys.stderr, flush=True)
    measurements = serve.measure_levels(
        model, levels, log=options.out / f"{name}-millrace.log", flags=options.flags
    )
    if "transformers" in options.peer:
        print(f"{name}: transformers ...", file=sys.stderr, flush=True)
        log = options.out / f"{name}-transformers.log"
        closed = [level for level in levels if level.concurrency is not None]
        measurements += transformers_cb.measure_levels(model, closed, log=log)
    return measurements


def write(name: str, measurements: Sequence[Measurement], options: argparse.Namespace) -> None:
    """`<out>/<name>.json` with everything needed to repeat the run, and `<out>/<name>.svg`."""
    facts = machine.describe()
    result: dict[str, Any] = {
        "model": name,
        "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "measurements": [measurement.as_json() for measurement in measurements],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    title = f"{name}, bfloat16, on {facts['cpu']} ({facts['cores']})"
    (options.out / f"{name}.svg").write_text(plot.chart(title, measurements))


def main() -> int:
    """Measure, and fail when a request failed or a server did not run."""
    options = parse_arguments(sys.argv[1:])
    failed = False
    for name in options.model:
        try:
            measurements = run_model(name, options)
        except (serve.ServerError, transformers_cb.PeerError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        write(name, measurements, options)
        print(f"\n{name}\n\n{report.table(measurements)}\n", flush=True)
        failed = failed or any(measurement.failures for measurement in measurements)
    print(f"Results, charts and logs are in {options.out}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
