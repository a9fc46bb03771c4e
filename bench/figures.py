"""`python -m bench.figures`: write the table of served speeds from bench/results into README.md and bench/RESULTS.md.

The table stands between `<!-- figures -->` and `<!-- /figures -->`. `--check` writes nothing; exit code 1 where a page
differs from the recorded runs. A newer run takes its place in `MACHINES`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.paths import BENCH, RESULTS_FOLDER, ROOT
from bench.harness.repeats import figure
from bench.peers.engines import OURS

PAGES = {ROOT / "README.md": "bench/results", BENCH / "RESULTS.md": "results"}
"""Each page with the path from it to the runs."""
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->"
LEVELS = {"1 client": "c=1 128+64", "8 clients": "c=8 128+64", "32 clients": "c=32 128+64"}
PEER = "vllm"


class MissingFigureError(Exception):
    """A page lacks the markers, or a run lacks a level."""


@dataclass(frozen=True, slots=True)
class Served:
    """The newest runs of one machine, as names in bench/results; the later one of two counts."""

    machine: str
    runs: Sequence[str]
    beside_peer: str
    """The newest run in which the peer took turns with Millrace."""


MACHINES = (
    Served(
        "Intel Xeon with AMX",
        (
            "2026-11-24-1026-comparison-135m-served-against-1c8e212",
            "2026-11-24-1029-comparison-135m-served-against-1c8e212",
        ),
        "2026-11-21-comparison-135m-shape-served-cpu",
    ),
    Served(
        "AMD EPYC (Zen 4), no AMX",
        ("2026-11-23-1831-comparison-135m-shape-cpu",),
        "2026-11-23-0222-comparison-135m-shape-cpu",
    ),
)


def rates(run: str) -> dict[tuple[str, str], float]:
    """Median tokens a second of a run by level and server."""
    content: dict[str, Any] = json.loads((RESULTS_FOLDER / f"{run}.json").read_text())
    return {
        (each["level"], each["server"]): each["tokens_per_second"]["median"]
        for each in content["figures"]["measurements"]
    }


def newest(served: Served) -> dict[str, float]:
    """Millrace's tokens a second by level; raises MissingFigureError."""
    found = {
        level: rate
        for run in served.runs
        for (level, server), rate in rates(run).items()
        if server == OURS
    }
    if missing := set(LEVELS.values()) - set(found):
        raise MissingFigureError(f"{served.machine}: no run of {', '.join(sorted(missing))}")
    return found


def table(folder: str) -> str:
    """Markdown; `folder` is the path from the page to the runs."""
    lines = [
        f"| machine | Millrace | {' | '.join(LEVELS)} | runs |",
        f"|---|---|{'--:|' * len(LEVELS)}---|",
    ]
    for served in MACHINES:
        ours, beside = newest(served), rates(served.beside_peer)
        shown = [f"**{figure(ours[level])}**" for level in LEVELS.values()]
        ratios = [f"{beside[level, OURS] / beside[level, PEER]:.2f}" for level in LEVELS.values()]
        lines += [
            f"| {served.machine} | tokens/s | {' | '.join(shown)} | {_links(served.runs, folder)} |",
            f"| | times vLLM | {' | '.join(ratios)} | {_links([served.beside_peer], folder)} |",
        ]
    return "\n".join(lines) + "\n"


def _links(runs: Sequence[str], folder: str) -> str:
    return ", ".join(f"[{run[:10]}]({folder}/{run}.json)" for run in runs)


def with_table(page: str, folder: str) -> str:
    """The text of a page with the current table; raises MissingFigureError for one without markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MissingFigureError(f"no {BEGIN.strip()} … {END}")
    return before + begin + table(folder) + end + after


def outdated(pages: Mapping[Path, str] = PAGES) -> dict[Path, str]:
    """The new text of each page that differs from the recorded runs. Raises MissingFigureError."""
    found = {}
    for path, folder in pages.items():
        page = path.read_text()
        if (wanted := with_table(page, folder)) != page:
            found[path] = wanted
    return found


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 with --check where a page differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    changed = outdated()
    for path, text in changed.items():
        print(f"{path.relative_to(ROOT)} {'differs' if options.check else 'is written'}")
        if not options.check:
            path.write_text(text)
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
