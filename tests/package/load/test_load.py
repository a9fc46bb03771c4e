"""The load generator against a server whose every byte is known, its levels and its measurements."""

from __future__ import annotations

import asyncio
import io
import random
import statistics
from pathlib import Path

import pytest
from bench.comparison.report import level_table

from millrace.load.levels import closed, parse_level, poisson
from millrace.load.live import START_OF_LINE, LiveLine, header, line_of, moving_line
from millrace.load.load import RequestOutcome, run_level
from millrace.load.measurement import (
    Measurement,
    Quantiles,
    Timeline,
    quantile,
    summarise,
)
from millrace.load.texts import prompts_of
from millrace_testing.router.sse import FakeServer, event, served, whole_stream

LEVEL = closed(3, 5, 4, rounds=2)


async def test_every_token_of_every_request_is_stamped_in_order() -> None:
    fake = FakeServer(whole_stream)
    async with served(fake) as url:
        outcome = await run_level(url, LEVEL)
    assert outcome.failures == []
    assert [len(timeline.arrivals) for timeline in outcome.timelines] == [4] * 6
    for timeline in outcome.timelines:
        assert timeline.due <= timeline.arrivals[0]
        assert timeline.arrivals == sorted(timeline.arrivals)


async def test_a_closed_loop_keeps_its_concurrency_and_sends_each_prompt_once() -> None:
    fake = FakeServer(whole_stream, hold=3)
    async with served(fake) as url:
        await run_level(url, LEVEL)
    assert fake.most_at_once == 3
    assert sorted(body["inputs"] for body in fake.bodies) == sorted(LEVEL.prompts())


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    level = poisson(2000.0, 3, 2, num_requests=12)
    fake = FakeServer(whole_stream, hold=12)
    async with served(fake) as url:
        outcome = await run_level(url, level)
    assert fake.most_at_once == 12
    assert len(outcome.timelines) == 12


async def test_events_may_come_in_any_pieces() -> None:
    def byte_by_byte(body: dict[str, object]) -> list[bytes]:
        stream = b":\n\n" + b"".join(whole_stream(body))
        return [stream[i : i + 1] for i in range(len(stream))]

    async with served(FakeServer(byte_by_byte)) as url:
        outcome = await run_level(url, closed(1, 5, 4, rounds=1))
    assert outcome.failures == []
    assert len(outcome.timelines[0].arrivals) == 4


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([event(1, last=False), event(3, last=True)], "token 3 came as 2"),
        ([event(1, last=False), event(1, last=False)], "token 1 came as 2"),
        ([event(1, last=False), event(2, last=False)], "without an end"),
        ([event(1, last=True)], "asked for 2 tokens, got 1"),
        ([event(1, last=False), event(2, last=True, generated=5)], "details say 5"),
        ([b'data: {"error":"no","error_type":"generation"}\n\n'], "generation: no"),
        ([event(1, last=False)[:-4]], "inside an event"),
        ([], "without an end"),
    ],
)
async def test_a_stream_that_is_not_whole_is_a_failure(pieces: list[bytes], reason: str) -> None:
    async with served(FakeServer(lambda _: pieces)) as url:
        outcome = await run_level(url, closed(1, 5, 2, rounds=1))
    assert outcome.timelines == []
    assert len(outcome.failures) == 1
    assert reason in outcome.failures[0]


MEASURED = closed(2, 4, 3, rounds=1)


def test_figures_of_two_known_requests_are_right() -> None:
    timelines = [Timeline(10.0, [10.5, 10.6, 10.8]), Timeline(10.2, [10.9, 11.2, 12.0])]
    result = summarise("millrace", MEASURED, timelines, failures=["late"])
    assert result.num_tokens == 6
    assert result.wall_seconds == pytest.approx(2.0)
    assert result.tokens_per_second == pytest.approx(3.0)
    assert result.first_token_ms.p50 == pytest.approx(600.0)
    assert result.between_tokens_ms.p50 == pytest.approx(250.0)
    assert result.failures == ("late",)


def test_quantiles_agree_with_the_standard_library() -> None:
    generator = random.Random(7)
    sample = sorted(generator.random() for _ in range(137))
    expected = statistics.quantiles(sample, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert quantile(sample, percent / 100) == pytest.approx(expected[percent - 1])


def measurement(server: str, tokens_per_second: float, *, other_cores: float = 0.0) -> Measurement:
    return Measurement(
        server=server,
        level="c=2 <4+3>",
        num_requests=2,
        num_tokens=6,
        failures=(),
        wall_seconds=2.0,
        tokens_per_second=tokens_per_second,
        first_token_ms=Quantiles(1.0, 2.0, 3.0),
        between_tokens_ms=Quantiles(4.0, 5.0, 6.0),
        other_cores=other_cores,
    )


def test_the_table_gives_the_ratio_and_marks_a_disturbed_figure() -> None:
    rows = level_table([measurement("millrace", 30.0), measurement("peer", 20.0, other_cores=0.5)])
    ours, theirs = rows.splitlines()[2:]
    assert [cell.strip() for cell in ours.split("|")[2:6]] == ["millrace", "30.0", "30.0", ""]
    assert [cell.strip() for cell in theirs.split("|")[2:6]] == ["peer", "~20.0", "~20.0", "~1.50"]


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("c8:128+64", closed(8, 128, 64)),
        ("c32:128+128x1", closed(32, 128, 128, rounds=1)),
        ("r4:128+64", poisson(4.0, 128, 64, num_requests=100)),
        ("r0.5:16+8x10", poisson(0.5, 16, 8, num_requests=10)),
    ],
)
def test_a_level_reads_as_it_is_written(text: str, level: object) -> None:
    assert parse_level(text) == level


@pytest.mark.parametrize("text", ["", "c", "x8:1+1", "c8", "c8:128", "c8:a+b", "c0:1+1", "c1:0+1"])
def test_a_malformed_level_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="level"):
        parse_level(text)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def outcome() -> RequestOutcome:
    """One request that has ended, and one that runs."""
    done, running = Timeline(0.0, [0.5, 0.6, 0.8]), Timeline(0.0, [1.0])
    return RequestOutcome([done], [], [done, running])


def test_the_running_level_is_shown_with_its_figures_so_far() -> None:
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


def test_lines_are_text_or_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('one\n\n{"inputs": "two"}\n{"text": "three", "x": 1}\n')
    assert prompts_of(file) == ("one", "two", "three")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "no prompts"), ("a\n{", "line 2 is not JSON"), ('{"x": 1}', "line 1 lacks `prompt`")],
)
def test_invalid_prompts_are_refused_with_a_reason(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason):
        prompts_of(file)
