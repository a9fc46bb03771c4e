"""The audit reports a server's violations and accepts allowed errors."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest
from bench.faults.adapters import MAX_LORAS
from bench.faults.chaos.allowed_errors import AllowedError, AllowedErrors
from bench.faults.chaos.audit import (
    MAX_SHOWN,
    MEMORY_GROWTH,
    SLACK_FDS,
    SLACK_THREADS,
    Ledger,
    Reading,
    leaks,
    not_idle,
    read,
    refusal_flaws,
)
from bench.faults.chaos.campaign import Fault, Kind
from bench.faults.chaos.injection import most_restarts
from bench.faults.chaos.pauses import Pause
from bench.faults.chaos.report import as_json, text
from bench.faults.chaos.run import Outcome
from bench.faults.members import Members

from millrace_router.adapters.fetcher import MAX_AT_ONCE
from millrace_shard.structured_output.grammar_compiler import NUM_COMPILES

BASE = Reading(resident=100 * 2**20, num_fds=20, num_threads=10)
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


def test_adapters_must_not_be_in_use_nor_too_many() -> None:
    series = 'vllm:lora_requests_info{{max_lora="6",running_lora_adapters="{}",waiting_lora_adapters="{}"}}'
    assert not_idle(IDLE | {series.format("", ""): 5.0}) == []
    assert not_idle(IDLE | {series.format("a,b", ""): 5.0}) == ["running adapters are a,b"]
    assert not_idle(IDLE | {series.format("", "c"): 5.0}) == ["waiting adapters are c"]
    assert not_idle(IDLE | {"millrace_adapters_resident": float(MAX_LORAS)}) == []
    assert len(not_idle(IDLE | {"millrace_adapters_resident": MAX_LORAS + 1.0})) == 1


def test_leaks_are_what_the_slack_does_not_cover() -> None:
    slack = replace(
        BASE,
        num_fds=BASE.num_fds + SLACK_FDS,
        num_threads=BASE.num_threads + SLACK_THREADS,
        resident=BASE.resident + MEMORY_GROWTH,
    )
    assert leaks("router", BASE, slack) == []
    assert len(leaks("router", BASE, replace(slack, num_fds=slack.num_fds + 1))) == 1
    assert len(leaks("router", BASE, replace(slack, num_threads=slack.num_threads + 1))) == 1
    assert len(leaks("router", BASE, replace(slack, resident=slack.resident + 1))) == 1


@pytest.mark.parametrize("after", ["", "0", "soon", "-1"])
def test_a_refusal_says_when_to_come_again(after: str) -> None:
    body = {"error": "busy", "error_type": "overloaded"}
    assert refusal_flaws({"retry-after": "2"}, body) == []
    assert refusal_flaws({"retry-after": after}, body)
    assert refusal_flaws({"retry-after": "2"}, {"error_type": "validation"})
    assert refusal_flaws({"retry-after": "2"}, body, error_type="unavailable")


def test_every_problem_counts_though_not_all_are_kept() -> None:
    ledger = Ledger()
    for number in range(3 * MAX_SHOWN):
        ledger.wrong(f"problem {number}")
    assert ledger.num_problems == 3 * MAX_SHOWN
    assert len(ledger.problems) == MAX_SHOWN


def test_an_error_is_allowed_while_its_period_lasts_and_not_after() -> None:
    allowed = AllowedErrors()
    allowed.begin(AllowedError.RESETS, 10.0)
    assert allowed.allow(AllowedError.RESETS, 5.0, 10.5)
    allowed.end(AllowedError.RESETS, 12.0)
    assert allowed.allow(AllowedError.RESETS, 11.0, 20.0)
    assert allowed.allow(AllowedError.RESETS, 0.0, 50.0)
    assert not allowed.allow(AllowedError.RESETS, 12.1, 20.0)
    assert not allowed.allow(AllowedError.RESETS, 0.0, 9.9)
    assert not allowed.allow(AllowedError.REFUSALS, 11.0, 11.5)


def test_a_process_that_is_gone_is_not_read() -> None:
    ended = psutil.Popen(["true"])
    ended.wait()
    found = read({"launcher": psutil.Process(), "shard-0": ended})
    assert list(found) == ["launcher"]
    assert found["launcher"].resident > 1e6
    assert found["launcher"].num_fds > 0
    assert found["launcher"].num_threads > 0


def test_the_search_for_a_poison_request_is_bounded_by_the_contract() -> None:
    assert most_restarts(64) == 14


def members(*commands: str) -> Members:
    found = Members()
    for pid, command in enumerate(commands):
        found.add(pid, command)
    return found


ALL = (
    "python -m millrace_router --port=1",
    "python -m millrace_shard serve --json-output /model",
    "python -m millrace_shard serve --rank=1 --world-size=2 /model",
    "python -m millrace_launcher.processes.guard /tmp/shard-0 /tmp/shard-1",
)


def test_a_family_is_one_of_each() -> None:
    assert members(*ALL).is_complete(2)
    assert members(*ALL).pids() == {0, 1, 2}
    assert not members(*ALL).is_complete(1)
    for missing in range(len(ALL)):
        assert not members(*ALL[:missing], *ALL[missing + 1 :]).is_complete(2)


@pytest.mark.parametrize("further", [*ALL, "ended without a wait", "sh -c something"])
def test_extra_processes_make_it_incomplete(further: str) -> None:
    assert not members(*ALL, further).is_complete(2)


def test_grammars_are_tried_out_in_as_many_processes_as_there_may_be() -> None:
    worker = "python -m millrace_shard.structured_output.grammar_worker /model"
    assert members(*ALL, *[worker] * (1 + NUM_COMPILES)).is_complete(2)
    assert not members(*ALL, *[worker] * (2 + NUM_COMPILES)).is_complete(2)


def test_two_adapters_are_fetched_at_a_time() -> None:
    fetching = "python -P -m millrace_router.adapters.fetching"
    assert members(*ALL, *[fetching] * MAX_AT_ONCE).is_complete(2)
    assert members(*ALL, fetching).fetchers == [len(ALL)]
    assert not members(*ALL, *[fetching] * (MAX_AT_ONCE + 1)).is_complete(2)


def test_the_report_shows_faults_and_problems() -> None:
    fault = Fault(kind=Kind.KILL, ranks=(0,), delay=0.1, seed=1)
    pauses = [
        Pause(fault_at=10.0, resumed_at=10.0 + silence + 0.25, silence=silence, all_moving=moving)
        for silence, moving in ((2.0, 3.0), (4.0, None))
    ]
    outcome = Outcome(recovered=[(fault, pause) for pause in pauses], exit_code=0)
    outcome.ledger.seconds["until a 429"].extend([0.008, 0.01])
    assert "Audit: clean" in text(outcome)
    outcome.not_recovered.append(fault)
    outcome.ledger.wrong("request 3: event 2 is b instead of a")
    shown = text(outcome)
    assert "Audit: 1 problems" in shown
    assert "request 3: event 2" in shown
    cells = [cell.strip() for cell in shown.splitlines()[2].split("|")]
    assert cells[1:6] == [Kind.KILL.value.text, "3", "2", "3.00", "4.00"]
    assert cells[6:10] == ["3.25", "4.25", "3.00", "3.00"]
    assert "until a 429: p50 9, " in shown
    content = as_json(outcome)
    assert content["faults"][0]["silence_max"] == 4.0
    assert content["faults"][-1]["injected"] == 3
    assert content["not_recovered"] == ["KILL"]
