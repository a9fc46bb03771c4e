"""CPU time of each plane during one level of load.

`python -m bench.profile.router_share [--level c32:128+128x1] [--profile router.prof]`. With `--profile` the
router runs under cProfile (environment variable MILLRACE_PROFILE), which inflates its share: take the
functions from such a run, and the share from a run without.
"""

from __future__ import annotations

import argparse
import os
import pstats
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.harness.checkpoints import SHAPES, ensure_checkpoint
from bench.harness.machine import cpu_seconds
from bench.harness.paths import MODELS_FOLDER, OUT
from bench.harness.server import WARM_UP, RunningServer, measure, serving
from millrace.load.levels import parse_level

PLANES = ("router", "shard", "launcher")
TOP_FUNCTIONS = 25


def plane_of(command: Sequence[str]) -> str | None:
    """The plane of a process by its argument vector; None for another program."""
    for argument in command[:4]:
        name = Path(argument).name
        for plane in PLANES:
            if name in {f"millrace_{plane}", f"millrace-{plane}"}:
                return plane
    return None


def by_plane(processes: Sequence[psutil.Process]) -> dict[str, list[psutil.Process]]:
    """The server's processes by plane."""
    planes: dict[str, list[psutil.Process]] = {plane: [] for plane in PLANES}
    for process in processes:
        plane = plane_of(process.cmdline())
        if plane is not None:
            planes[plane].append(process)
    return planes


def seconds_by_plane(server: RunningServer) -> dict[str, float]:
    """CPU seconds of each plane so far."""
    return {plane: cpu_seconds(ps) for plane, ps in by_plane(server.processes()).items()}


def print_profile(path: Path) -> None:
    """Print the router's functions by own time."""
    pstats.Stats(str(path)).sort_stats("tottime").print_stats(TOP_FUNCTIONS)


def main() -> int:
    """Print CPU microseconds a token and the share of the total, plane by plane."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.profile.router_share", description=__doc__
    )
    parser.add_argument("--model", default="135m", choices=SHAPES)
    parser.add_argument("--level", type=parse_level, default=parse_level("c32:128+128x1"))
    parser.add_argument("--profile", type=Path, help="where the router's cProfile data goes")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    model = ensure_checkpoint(options.model, folder=MODELS_FOLDER)
    environment = {}
    if options.profile is not None:
        environment["MILLRACE_PROFILE"] = os.fspath(options.profile.resolve())
    log = options.out / "router_share.log"
    with serving(model, log=log, environment=environment) as server:
        measure(server, WARM_UP)
        before = seconds_by_plane(server)
        result = measure(server, options.level)
        after = seconds_by_plane(server)
    used = {plane: after[plane] - before[plane] for plane in PLANES}
    total = sum(used.values())
    print(
        f"{result.level}: {result.tokens_per_second:.1f} tok/s, {result.num_tokens} tokens,"
        f" {result.wall_seconds:.2f} s, others used {result.other_cores:.2f} cores"
    )
    for plane, seconds in used.items():
        print(
            f"{plane:>9}: {1e6 * seconds / result.num_tokens:9.1f} us a token"
            f"  {100 * seconds / total if total else 0:5.1f} % of the CPU"
            f"  {seconds / result.wall_seconds:5.2f} cores"
        )
    if options.profile is not None:
        if not options.profile.exists():
            print(f"the router wrote no profile to {options.profile}", file=sys.stderr)
            return 1
        print_profile(options.profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
