"""`python -m bench.adapters`: LoRA adapters over HTTP.

`unused`: a server with adapters that no request uses. `mixed`: one adapter, or 32, in a batch. `zipf`: a thousand
adapters with memory for 64. `loading`: loads beside running streams. `registered`: the memory that ten thousand names
take. `peers`: PEFT on `transformers`, and vLLM. `--record` writes each table to bench/results. `--quick` only shows
that everything runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench.adapters import loading, mixed, peers, registered, unused, zipf
from bench.parts import run
from bench.peers.process import EngineError

PARTS = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (unused, mixed, zipf, loading, registered, peers)
}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    return run.parse_arguments("adapters", __doc__, PARTS, arguments, model="135m", repeats=5)


def main() -> int:
    """Exit code 1 when an experiment could not be measured."""
    options = parse_arguments(sys.argv[1:])
    return run.run_parts("adapters", PARTS, options, EngineError)


if __name__ == "__main__":
    sys.exit(main())
