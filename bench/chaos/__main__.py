"""`python -m bench.chaos`: break the server at random, under load, and audit what it did about it."""

from __future__ import annotations

import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from bench import machine
from bench.chaos import report
from bench.chaos.options import DEMO, launcher_flags, parse_arguments
from bench.chaos.run import run
from bench.chaos.server import serving
from bench.plan import say
from bench.record import append
from bench.serve import ServerError

RESULTS = Path(__file__).parents[1] / "RESULTS.md"


def section(text: str, *, seed: int, command: str) -> str:
    """The tables under a heading that says when and where."""
    facts = machine.describe()
    return (
        f"## Chaos, seed {seed} ({datetime.now(UTC):%Y-%m-%d %H:%M})\n\n"
        f"`{command}` at commit {facts['commit']}, on {facts['cpu']} ({facts['cores']}), {facts['memory']},"
        f" torch {facts['torch']}, Python {facts['python']}.\n\n{text}\n"
    )


def main(arguments: list[str]) -> int:
    """0 when every fault was survived and the audit found nothing."""
    options = parse_arguments(arguments)
    try:
        with serving(
            DEMO, log=options.log, num_ranks=options.num_shard, flags=launcher_flags(options)
        ) as server:
            say(f"serving at {server.url}, log in {options.log}")
            story = asyncio.run(run(server, options))
    except ServerError as error:
        say(str(error))
        return 1
    tables = report.text(story)
    print(f"\n{tables}", flush=True)
    if options.record:
        command = shlex.join(["python", "-m", "bench.chaos", *arguments])
        append(section(tables, seed=options.seed, command=command), RESULTS)
    return 1 if story.ledger.num_problems or story.not_survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
