"""The table on a terminal."""

from __future__ import annotations

import asyncio
import io

from millrace.load.levels import closed
from millrace.load.live import START_OF_LINE, LiveLine, header, line_of, moving_line
from millrace.load.load import RequestOutcome
from millrace.load.measurement import Timeline, summarise


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def outcome() -> RequestOutcome:
    """One request that has ended, and one that runs."""
    done, running = Timeline(0.0, [0.5, 0.6, 0.8]), Timeline(0.0, [1.0])
    return RequestOutcome([done], [], [done, running])


def test_the_running_level_is_told_by_what_came_so_far() -> None:
    cells = moving_line("c=2", 4, outcome(), 2.0).split()
    assert cells == ["c=2", "1/4", "0", "0.50", "2.0", "750/950/995"]


def test_a_level_that_has_ended_is_a_line_below_the_header() -> None:
    measurement = summarise("m", closed(1, 4, 3, rounds=1), outcome().timelines, failures=["x"])
    line = line_of(measurement)
    assert line.split()[2:] == [
        "1",
        "1",
        "1.25",
        "3.8",
        "500/500/500",
        "150/190/199",
        "800/800/800",
    ]
    assert {len(each) for each in (line, *header().splitlines())} == {len(line)}


async def test_a_terminal_has_a_line_that_moves_and_goes() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        async with LiveLine(stream, "c=2", 4, outcome()):
            await asyncio.sleep(0)
    assert terminal.getvalue().startswith(f"{START_OF_LINE}       c=2")
    assert terminal.getvalue().endswith(START_OF_LINE)
    assert pipe.getvalue() == ""
