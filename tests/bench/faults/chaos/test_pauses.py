"""The parts of a pause, from arrivals and logs written by hand."""

from __future__ import annotations

import json

import pytest
from bench.faults.chaos.pauses import PARTS, Arrivals, all_moving_at, parts, pause_end
from bench.faults.deployment import Line, parse_lines


def test_tokens_under_way_do_not_end_a_pause() -> None:
    arrivals = [0.9, 1.01, 1.02, 4.0, 4.1, 4.2]
    assert pause_end(arrivals, since=1.0, until=9.0) == 4.0


def test_a_pause_has_no_end_before_its_time() -> None:
    assert pause_end([0.5, 4.0], since=1.0, until=3.0) is None
    assert pause_end([], since=1.0, until=3.0) is None


def test_all_move_once_the_last_stream_that_was_held_up_does() -> None:
    streams = [
        [0.1, 0.2, 5.0, 5.1],
        [0.1, 5.3, 5.4],
        [0.1, 0.2],  # Had ended.
        [7.0, 7.1],  # Had not begun.
        [],
    ]
    assert all_moving_at(streams, resumed=5.0, until=9.0) == 5.3


def test_the_stream_that_moved_first_is_not_waited_for_twice() -> None:
    assert all_moving_at([[0.1, 5.0, 8.0]], resumed=5.0, until=9.0) == 5.0


def test_a_stream_that_does_not_move_in_time() -> None:
    assert all_moving_at([[0.1, 5.0], [0.1, 9.5]], resumed=5.0, until=9.0) is None


def test_a_pause_is_measured_from_the_fault_and_over_the_streams_that_ran() -> None:
    arrivals = Arrivals()
    for stream, now in ((1, 90.0), (2, 90.1), (3, 90.2)):
        arrivals.token(stream, now)
    arrivals.end(3)
    arrivals.start(100.0)
    for stream, now in ((1, 100.5), (1, 107.0), (4, 107.1), (2, 107.25), (1, 107.5)):
        arrivals.token(stream, now)
    pause = arrivals.pause()
    assert pause is not None
    assert (pause.silence, pause.first_token, pause.all_moving) == (6.5, 7.0, 7.25)
    assert arrivals.num_tokens == 5
    arrivals.start(200.0)
    assert (arrivals.pause(), arrivals.num_tokens) == (None, 0)


def lines() -> list[Line]:
    moments = {
        "Shard 0 crashed (killed by signal SIGKILL)": 100.1,
        "Starting shard 0": 100.3,
        "weights loaded in 0.5 s, 7 MB": 103.0,
        "Server started at unix:///tmp/x-0": 103.25,
        "KV cache of 131072 tokens": 104.0,
    }
    return [
        Line(
            moment,
            "millrace_launcher" if place < 2 else "millrace_shard.commands.serve",
            message,
        )
        for place, (message, moment) in enumerate(moments.items())
    ]


def test_parts_add_up_to_the_pause() -> None:
    before = [Line(90.0, "millrace_launcher", "Starting shard 0")]
    found = parts([*before, *lines()], since=100.0, until=104.5)
    expected = (0.1, 0.2, 2.2, 0.5, 0.25, 0.75, 0.5)
    assert list(found) == list(PARTS)
    assert list(found.values()) == pytest.approx(expected)
    assert sum(found.values()) == pytest.approx(4.5)


def test_of_several_attempts_and_ranks_the_last_counts() -> None:
    second = [
        Line(101.0, "millrace_launcher", "Starting shard 1"),
        Line(103.5, "millrace_shard.commands.composition", "weights loaded in 0.25 s, 7 MB"),
    ]
    found = parts([*lines(), *second], since=100.0, until=104.5)
    assert found["started"] == pytest.approx(0.9)
    assert found["imports"] == pytest.approx(2.25)
    assert found["weights"] == pytest.approx(0.25)


def test_the_router_may_be_the_first_to_notice() -> None:
    failed = Line(100.05, "millrace_router.engine.batcher", "shards failed; replaying")
    access = Line(100.01, "millrace_router.server.access_log", "request")
    found = parts([access, failed, *lines()], since=100.0, until=104.5)
    assert found["noticed"] == pytest.approx(0.05)


def test_without_a_part_in_the_log_there_are_none() -> None:
    assert parts(lines()[:-1], since=100.0, until=104.5) == {}


def test_lines_of_a_log_in_json() -> None:
    record = {
        "timestamp": "2026-11-21T12:00:00.500000Z",
        "level": "INFO",
        "fields": {"message": "Starting shard 0"},
        "target": "millrace_launcher",
    }
    whole = json.dumps(record)
    (line,) = parse_lines(f"{whole}\nplain text\n{{}}\n[]\n{whole[:40]}")
    assert line == Line(1795262400.5, "millrace_launcher", "Starting shard 0")
