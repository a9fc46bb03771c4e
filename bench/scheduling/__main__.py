"""`python -m bench.scheduling`: prefix cache, chunking, KV growth, fairness, predictions, simulator, planner and more.

Each part starts our launcher with the flags that it compares, sends its load and prints a table; `planner`, `forecasts`
and `speed` need no server. `--record` writes each table to bench/results. `--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.parts import run
from bench.parts.simulation import SimulationFailed
from bench.scheduling import (
    chunking,
    forecasts,
    mixed,
    planner,
    predictions,
    prefix,
    reservation,
    simulator,
    speed,
    tenants,
)
from bench.scheduling.simulator import LogLags

PARTS = {
    module.PART.name: module.PART
    for module in (
        prefix,
        chunking,
        mixed,
        reservation,
        tenants,
        predictions,
        simulator,
        planner,
        forecasts,
        speed,
    )
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    return run.parse_arguments("scheduling", __doc__, PARTS, arguments, model="135m")


def main() -> int:
    """Exit code 1 when a part could not be measured."""
    options = parse_arguments(sys.argv[1:])
    return run.run_parts("scheduling", PARTS, options, SimulationFailed, LogLags)


if __name__ == "__main__":
    sys.exit(main())
