"""`python -m bench.structured_output`: the cost of grammars, and the validity of outputs.

Each part starts our launcher, on the demo model by default. `--record` writes each table to bench/results. `--quick`
only shows that everything runs. Exit code 1 where a part failed or an output did not match its schema.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.parts import run
from bench.structured_output import batch_composition, large, validity

PARTS = {
    part.name: part
    for part in (batch_composition.BESIDE, batch_composition.RATES, validity.PART, large.LARGE)
}
DEFAULT = ("beside", "rates", "validity")


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    return run.parse_arguments(
        "structured_output", __doc__, PARTS, arguments, model="demo", default=DEFAULT
    )


def main() -> int:
    """Exit code 1 when a part could not be measured, or an output did not match its schema."""
    return run.run_parts("structured_output", PARTS, parse_arguments(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
