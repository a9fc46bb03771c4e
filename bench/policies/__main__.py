"""`python -m bench.policies`: no batching, static batching and continuous batching on one engine.

`variance`: throughput over the variance of output lengths. `latency`: the distribution of request latency at three
rates. Each one prints a table and draws an SVG chart into the folder of `--out`. `--record` writes each table to
bench/results, and the charts to docs/images instead. `--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.parts import run
from bench.parts.simulation import SimulationFailed
from bench.policies import latency, variance
from millrace.simulate.config import ConfigError
from millrace.simulate.engine import StuckError

PARTS = {part.name: part for part in (variance.EXPERIMENT, latency.EXPERIMENT)}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    return run.parse_arguments("policies", __doc__, PARTS, arguments, model="135m")


def main() -> int:
    """Exit code 1 when an experiment could not be measured."""
    options = parse_arguments(sys.argv[1:])
    return run.run_parts("policies", PARTS, options, SimulationFailed, ConfigError, StuckError)


if __name__ == "__main__":
    sys.exit(main())
