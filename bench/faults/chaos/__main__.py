"""`python -m bench.faults.chaos`: break the server at random, under load, and audit what is left."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from bench.faults.adapters import Adapters
from bench.faults.chaos import report
from bench.faults.chaos.options import launcher_flags, parse_arguments
from bench.faults.chaos.run import run
from bench.faults.deployment import deployed
from bench.harness.command_line import command, say
from bench.harness.paths import DEMO
from bench.harness.record import Record
from bench.harness.server import ServerError


def main(arguments: list[str]) -> int:
    """0 when the server recovered from every fault and the audit found nothing."""
    options = parse_arguments(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="millrace-adapters-") as folder:
            adapters = Adapters(Path(folder))
            flags = launcher_flags(options, adapters)
            with deployed(DEMO, *flags, log=options.log, num_ranks=options.num_shard) as server:
                say(f"serving at {server.url}, log in {options.log}")
                outcome = asyncio.run(run(server, options, adapters))
    except ServerError as error:
        say(str(error))
        return 1
    record = Record(
        bench="chaos",
        title=f"Chaos, seed {options.seed}",
        command=command("faults.chaos", arguments),
        figures=report.as_json(outcome),
    )
    print(f"\n{record.text(report.text(outcome))}", flush=True)
    if options.record:
        record.write()
    return 1 if outcome.ledger.num_problems or outcome.not_recovered else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
