"""`python -m bench.guidance`: what grammars cost, whether outputs always match, and how two libraries compare.

Parts that need a server start our launcher, on the demo model by default. `--record` writes each table into its own
section of RESULTS.md, in place of the one before it. `--quick` only shows that all runs. Exit code 1 where a part
failed or an output did not match its schema. The part `libraries` needs xgrammar, which nothing else here does.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.checkpoints import SHAPES
from bench.guidance import company, large, libraries, validity
from bench.parts import parts_parser
from bench.plan import say
from bench.scheduling import sections
from bench.scheduling.__main__ import lab_from, section
from bench.scheduling.client import RequestsFailed
from bench.serve import ServerError

PARTS = {
    part.name: part
    for part in (company.COMPANY, company.RATES, validity.PART, large.LARGE, libraries.PART)
}
RESULTS = Path(__file__).parents[1] / "RESULTS.md"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse ends the program on a bad one."""
    default = ["company", "rates", "validity"]
    parser = parts_parser("python -m bench.guidance", __doc__, PARTS, default=default)
    parser.add_argument("--model", default="demo", choices=(*SHAPES, "demo"))
    parser.add_argument("--repeats", type=int, default=1, help="a figure is their median")
    parser.add_argument("--quick", action="store_true", help="fewer requests; nothing to quote")
    options = parser.parse_args(arguments)
    if options.quick and options.record:
        parser.error("--quick measures nothing worth to --record")
    return options


def main() -> int:
    """Measure part by part; 1 when one of them could not be, or was not as it has to be."""
    options = parse_arguments(sys.argv[1:])
    lab, failed = lab_from(options), False
    command = shlex.join(["python", "-m", "bench.guidance", *sys.argv[1:]])
    for name in options.only:
        part = PARTS[name]
        say(f"{name}: {', '.join(case.name for case in part.cases)}")
        try:
            table = part.measure(lab, repeats=options.repeats)
        except (ServerError, RequestsFailed, ImportError) as error:
            say(f"{name}: {error}")
            failed = True
            continue
        text = section(part, part.text(table), model=options.model, command=command)
        print(f"\n{text}", flush=True)
        if options.record:
            sections.record(text, RESULTS, key=f"{name} {options.model}", topic="guidance")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
