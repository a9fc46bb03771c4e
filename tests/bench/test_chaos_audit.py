"""What the audit holds against a server, and what it lets pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.chaos.audit import (
    MAX_SHOWN,
    MEMORY_GROWTH,
    SLACK_FDS,
    SLACK_THREADS,
    ShardState,
    Usage,
    leaks,
    not_idle,
    refusal_flaws,
)
from bench.chaos.campaign import Fault, Kind
from bench.chaos.report import text
from bench.chaos.run import Story
from bench.chaos.server import Members
from bench.chaos.weather import Pulse, Trouble, Weather

from millrace_shard.structured_output.grammar_compiler import MAX_COMPILES

BASE = Usage(fds=20, threads=10, memory=100 * 2**20)
IDLE = {"millrace_kv_blocks": 32.0, "millrace_kv_blocks_cached": 30.0}


def test_a_server_at_rest_is_idle() -> None:
    assert not_idle(IDLE | {"millrace_kv_blocks_in_use": 0.0, "tgi_queue_size": 0.0}) == []


@pytest.mark.parametrize(
    "series", ["millrace_kv_blocks_in_use", "tgi_queue_size", "millrace_requests_running"]
)
def test_whatever_goes_on_is_named(series: str) -> None:
    assert not_idle(IDLE | {series: 1.0}) == [f"{series} is 1"]


def test_blocks_must_be_conserved() -> None:
    assert not_idle({"millrace_kv_blocks": 32.0, "millrace_kv_blocks_cached": 33.0})
    assert not_idle({})


def test_leaks_are_what_the_slack_does_not_cover() -> None:
    slack = Usage(
        fds=BASE.fds + SLACK_FDS,
        threads=BASE.threads + SLACK_THREADS,
        memory=BASE.memory + MEMORY_GROWTH,
    )
    assert leaks("router", BASE, slack) == []
    assert len(leaks("router", BASE, replace(slack, fds=slack.fds + 1))) == 1
    assert len(leaks("router", BASE, replace(slack, threads=slack.threads + 1))) == 1
    assert len(leaks("router", BASE, replace(slack, memory=slack.memory + 1))) == 1


@pytest.mark.parametrize("after", ["", "0", "soon", "-1"])
def test_a_refusal_says_when_to_come_again(after: str) -> None:
    body = {"error": "busy", "error_type": "overloaded"}
    assert refusal_flaws({"retry-after": "2"}, body) == []
    assert refusal_flaws({"retry-after": after}, body)
    assert refusal_flaws({"retry-after": "2"}, {"error_type": "validation"})


def test_every_problem_counts_though_not_all_are_kept() -> None:
    ledger = ShardState()
    for number in range(3 * MAX_SHOWN):
        ledger.wrong(f"problem {number}")
    assert ledger.num_problems == 3 * MAX_SHOWN
    assert len(ledger.problems) == MAX_SHOWN


def test_trouble_excuses_what_it_overlaps_and_nothing_else() -> None:
    weather = Weather()
    weather.begin(Trouble.RESETS, 10.0)
    assert weather.excuses(Trouble.RESETS, 5.0, 10.5)
    weather.end(Trouble.RESETS, 12.0)
    assert weather.excuses(Trouble.RESETS, 11.0, 20.0)
    assert weather.excuses(Trouble.RESETS, 0.0, 50.0)
    assert not weather.excuses(Trouble.RESETS, 12.1, 20.0)
    assert not weather.excuses(Trouble.RESETS, 0.0, 9.9)
    assert not weather.excuses(Trouble.REFUSALS, 11.0, 11.5)


def test_the_longest_silence_begins_with_the_fault() -> None:
    pulse = Pulse()
    pulse.start(100.0)
    for now in (100.5, 107.0, 107.25):
        pulse.beat(now)
    assert pulse.longest == 6.5
    pulse.start(200.0)
    assert (pulse.longest, pulse.num_beats) == (0.0, 0)


def members(*commands: str) -> Members:
    found = Members()
    for pid, command in enumerate(commands):
        found.add(pid, command)
    return found


ALL = (
    "python -m millrace_router --port=1",
    "python -m millrace_shard serve --json-output /model",
    "python -m millrace_shard serve --rank=1 --world-size=2 /model",
    "python -m millrace_launcher.supervision.guard /tmp/shard-0 /tmp/shard-1",
)


def test_a_family_is_one_of_each() -> None:
    assert members(*ALL).is_complete(2)
    assert members(*ALL).pids() == {0, 1, 2}
    assert not members(*ALL).is_complete(1)
    for missing in range(len(ALL)):
        assert not members(*ALL[:missing], *ALL[missing + 1 :]).is_complete(2)


@pytest.mark.parametrize("further", [*ALL, "ended, nobody waited for it", "sh -c something"])
def test_nobody_is_there_twice_and_nobody_else_is(further: str) -> None:
    assert not members(*ALL, further).is_complete(2)


def test_grammars_are_tried_out_in_as_many_processes_as_there_may_be() -> None:
    worker = "python -m millrace_shard.structured_output.grammar_worker /model"
    assert members(*ALL, *[worker] * (1 + MAX_COMPILES)).is_complete(2)
    assert not members(*ALL, *[worker] * (2 + MAX_COMPILES)).is_complete(2)


def test_the_report_shows_faults_and_problems() -> None:
    fault = Fault(kind=Kind.KILL, ranks=(0,), delay=0.1, seed=1)
    story = Story(survived=[(fault, 2.0), (fault, 4.0)], exit_code=0)
    assert "Audit: clean" in text(story)
    story.not_survived.append(fault)
    story.ledger.wrong("request 3: event 2 is b instead of a")
    shown = text(story)
    assert "Audit: 1 problems" in shown
    assert "request 3: event 2" in shown
    cells = [cell.strip() for cell in shown.splitlines()[2].split("|")]
    assert cells[1:6] == [Kind.KILL.value, "3", "2", "3.00", "4.00"]
