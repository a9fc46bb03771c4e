"""The command line of a campaign, and the flags of its server."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from bench.faults.adapters import Adapters
from bench.faults.chaos.campaign import Kind
from bench.harness.paths import OUT

MAX_CONCURRENT = 64
KV_TOKENS = 2048


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--requests", type=_positive, default=1000, help="the least number of requests"
    )
    parser.add_argument("--faults", type=_positive, default=100, help="number of faults")
    parser.add_argument(
        "--kinds", type=_kinds, default=tuple(Kind), help="kinds of faults, with commas"
    )
    parser.add_argument("--clients", type=_positive, default=12, help="clients in a closed loop")
    parser.add_argument("--pool", type=_positive, default=180, help="distinct requests")
    parser.add_argument("--long", type=_positive, default=16, help="long streams besides")
    parser.add_argument("--num-shard", type=_positive, default=1)
    parser.add_argument(
        "--step-timeout", type=float, default=3.0, help="step timeout of the server, seconds"
    )
    parser.add_argument(
        "--seconds", type=float, default=3600.0, help="inject no faults after this time"
    )
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags for the launcher")
    parser.add_argument("--log", type=Path, default=OUT / "chaos.log")
    parser.add_argument(
        "--record", action="store_true", help="write the figures to bench/results, as JSON"
    )
    return parser.parse_args(arguments)


def launcher_flags(options: argparse.Namespace, adapters: Adapters) -> list[str]:
    """Flags with small limits, so that they are reached, and a short step timeout."""
    return [
        "--deterministic=on",
        f"--step-timeout={options.step_timeout:g}",
        f"--max-concurrent-requests={MAX_CONCURRENT}",
        f"--max-batch-total-tokens={KV_TOKENS}",
        "--graceful-termination-timeout=30",
        *adapters.flags(),
        *options.flags,
    ]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _kinds(text: str) -> tuple[Kind, ...]:
    names = text.upper().replace("-", "_").split(",")
    known = {kind.name: kind for kind in Kind}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no kind {', '.join(unknown)}; there are {', '.join(known).lower()}"
        )
    return tuple(known[name] for name in names)
