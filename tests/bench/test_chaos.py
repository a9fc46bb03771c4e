"""The schedule of faults and the population of requests: all that a seed decides."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from bench.faults.adapters import CHANGING, MAX_LORAS, SHELVED, STEADY
from bench.faults.chaos.__main__ import parse_arguments
from bench.faults.chaos.allowed_errors import AllowedError, AllowedErrors
from bench.faults.chaos.answers import (
    Answer,
    EventReader,
    difference,
    flaws,
    nearest,
    prefix_difference,
)
from bench.faults.chaos.audit import (
    MEMORY_GROWTH,
    SLACK_FDS,
    SLACK_THREADS,
    Reading,
    leaks,
    not_idle,
    refusal_flaws,
)
from bench.faults.chaos.campaign import USUAL, Kind, campaign
from bench.faults.chaos.pauses import PARTS, Arrivals, all_moving_at, parts
from bench.faults.chaos.population import Request, population
from bench.faults.chaos.scenes import SCENES
from bench.faults.deployment import Line
from bench.faults.members import Members

from millrace_router.process import NAME


def test_every_kind_is_there_and_the_weights_hold() -> None:
    counts = Counter(fault.kind for fault in campaign(7, num_faults=1000, num_ranks=1))
    total = sum(kind.value.weight for kind in USUAL)
    assert set(counts) == set(USUAL) == set(Kind) - {Kind.POISON}
    for kind in USUAL:
        assert counts[kind] == pytest.approx(1000 * kind.value.weight / total, abs=2.5)


def test_the_seed_decides_everything() -> None:
    assert campaign(1, num_faults=50, num_ranks=2) == campaign(1, num_faults=50, num_ranks=2)
    assert campaign(1, num_faults=50, num_ranks=2) != campaign(2, num_faults=50, num_ranks=2)
    assert population(1, size=30) == population(1, size=30)
    assert population(1, size=30) != population(2, size=30)


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_is_a_command_line_that_further_flags_change(name: str) -> None:
    options = parse_arguments([f"--scene={name}", "--faults=3", "--seed=5"])
    assert (options.scene, options.faults, options.seed) == (name, 3, 5)
    expected = SCENES[name].get("clients", 12)
    assert options.clients == expected
    assert options.adapters or not any(kind.value.needs_adapters for kind in options.kinds)


def test_the_population_is_mixed() -> None:
    requests = population(5, size=180)
    assert len({request.name for request in requests}) == 180
    assert {(request.path, request.streams) for request in requests} == {
        ("/generate_stream", True),
        ("/generate", False),
        ("/", True),
        ("/", False),
        ("/v1/chat/completions", True),
        ("/v1/chat/completions", False),
        ("/v1/completions", True),
        ("/v1/completions", False),
    }
    native = [request.body["parameters"] for request in requests if not request.is_openai]
    for key in ("seed", "stop", "top_n_tokens", "repetition_penalty", "decoder_input_details"):
        having = sum(key in parameters for parameters in native)
        assert 0 < having < len(native), key


def test_half_of_the_population_has_adapters() -> None:
    adapters = (*STEADY, SHELVED, *CHANGING)
    requests = population(5, size=500, adapters=adapters)
    named = Counter(request.adapter for request in requests if request.adapter)
    assert set(named) == set(adapters)
    assert 200 < named.total() < 300
    for request in requests:
        if request.is_openai:
            assert request.body["model"] == (request.adapter or "tgi")
            fields = request.body
        else:
            fields = request.body["parameters"]
            assert fields.get("adapter_id", "") == request.adapter
        assert ("adapter_source" in fields) == (request.adapter == SHELVED)
    natives = [request.body["parameters"] for request in requests if not request.is_openai]
    assert 0 < sum("merged_adapters" in parameters for parameters in natives) < 50


def test_every_request_that_samples_has_a_seed() -> None:
    for request in population(5, size=500):
        body = request.body
        if request.is_openai:
            assert body["temperature"] == 0 or "seed" in body
        else:
            parameters = body["parameters"]
            assert "temperature" not in parameters or "seed" in parameters
            assert "top_k" not in parameters or "seed" in parameters


NATIVE = Request(name="n", path="/generate_stream", body={})
OPENAI = Request(name="o", path="/v1/completions", body={"stream": True})
WHOLE = Request(name="w", path="/generate", body={})


def native(*, tokens: int = 3) -> Answer:
    events: list[dict[str, Any]] = [
        {"index": i, "token": {"id": 7 + i, "logprob": -0.5}, "generated_text": None}
        for i in range(1, tokens + 1)
    ]
    events[-1]["generated_text"] = "all of it"
    return Answer(status=200, events=events)


def chunk(index: int, text: str, reason: str = "", *, id_: str = "cmpl-1") -> dict[str, Any]:
    choice = {"index": index, "text": text, "finish_reason": reason}
    return {"id": id_, "created": 5, "choices": [choice]}


def openai(*, id_: str = "cmpl-1") -> Answer:
    events = [chunk(0, "a", id_=id_), chunk(0, "b", "length", id_=id_)]
    return Answer(status=200, events=events, num_done=1)


def test_whole_answers_have_no_flaws() -> None:
    assert flaws(NATIVE, native()) == []
    assert flaws(OPENAI, openai()) == []
    assert flaws(WHOLE, Answer(status=200, events=[{"generated_text": "x"}])) == []


@pytest.mark.parametrize("indexes", [[1, 3], [1, 2, 2], [2, 3], [0, 1], [1, 1]])
def test_token_indexes_must_count(indexes: list[int]) -> None:
    answer = native(tokens=len(indexes))
    for event, index in zip(answer.events, indexes, strict=True):
        event["index"] = index
    assert any("indexes" in flaw for flaw in flaws(NATIVE, answer))


def test_a_stream_without_an_end_is_flawed() -> None:
    answer = native()
    answer.events.pop()
    assert any("0 ends" in flaw for flaw in flaws(NATIVE, answer))


def test_an_error_in_a_stream_is_a_flaw() -> None:
    answer = native()
    answer.events.append({"error": "gone", "error_type": "generation"})
    assert flaws(NATIVE, answer)


@pytest.mark.parametrize("num_done", [0, 2])
def test_openai_streams_end_once(num_done: int) -> None:
    answer = openai()
    answer.num_done = num_done
    assert any("[DONE]" in flaw for flaw in flaws(OPENAI, answer))


def test_each_choice_ends_once() -> None:
    answer = openai()
    answer.events.append(chunk(1, "c"))
    assert any("choice 1 ended 0 times" in flaw for flaw in flaws(OPENAI, answer))


@pytest.mark.parametrize(("key", "value"), [("id", 99), ("logprob", -0.5000001)])
def test_ids_and_logprobs_of_tokens_count(key: str, value: float) -> None:
    other = native()
    other.events[1]["token"][key] = value
    found = difference(other, native())
    assert found is not None
    assert found.startswith("event 2")


def test_an_answer_equals_one_of_two_versions() -> None:
    old, new = native(), deepcopy(native())
    for event in new.events:
        event["token"]["logprob"] = -0.75
    mixed = Answer(status=200, events=[old.events[0], *new.events[1:]])
    for answer in (old, new):
        assert nearest(difference(answer, one) for one in (old, new)) is None
    found = nearest(difference(mixed, one) for one in (old, new))
    assert found is not None
    assert found.startswith("event 1")


def test_a_missing_or_further_event_is_a_difference() -> None:
    assert difference(native(tokens=2), native(tokens=3)) is not None
    assert difference(native(tokens=4), native(tokens=3)) is not None


def test_a_beginning_is_right_and_a_wrong_one_is_not() -> None:
    head = Answer(events=native().events[:2])
    assert prefix_difference(head, native()) is None
    wrong = deepcopy(head)
    wrong.events[0]["token"]["id"] = 0
    assert prefix_difference(wrong, native()) is not None
    assert prefix_difference(native(tokens=4), native(tokens=3)) is not None


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    text = b':\n\ndata: {"index": 1}\n\n:\n\ndata: {"index": 2}\n\ndata: [DONE]\n\ndata: {"cut'
    reader, answer = EventReader(), Answer()
    for at in range(0, len(text), size):
        for data in reader.feed(text[at : at + size]):
            answer.take(data)
    assert answer.events == [{"index": 1}, {"index": 2}]
    assert answer.num_done == 1
    assert reader.rest == b'data: {"cut'


def test_a_keyed_answer_goes_on_behind_its_last_event_with_an_id() -> None:
    text = b'id: 1\ndata: {"index": 1}\n\nid: 2\ndata: {"index": 2}\n\ndata: {"end": 1}\n\n'
    reader, answer = EventReader(), Answer(broken="reset")
    for data in reader.feed(text):
        answer.take(data)
    assert (reader.last_id, reader.num_numbered) == (2, 2)
    answer.num_numbered = reader.num_numbered
    answer.resume()
    assert answer.events == [{"index": 1}, {"index": 2}]
    assert not answer.broken


BASE = Reading(resident=100 * 2**20, num_fds=20, num_threads=10)
IDLE = {"millrace_kv_blocks": 32.0, "millrace_kv_blocks_cached": 30.0}


def test_a_server_at_rest_is_idle() -> None:
    assert not_idle(IDLE | {"millrace_kv_blocks_in_use": 0.0, "tgi_queue_size": 0.0}) == []


@pytest.mark.parametrize(
    "series", ["millrace_kv_blocks_in_use", "tgi_queue_size", "millrace_requests_running"]
)
def test_a_series_that_is_not_idle_is_named(series: str) -> None:
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


def test_only_growth_beyond_the_slack_is_a_leak() -> None:
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
def test_a_refusal_without_a_valid_retry_after_is_flawed(after: str) -> None:
    body = {"error": "busy", "error_type": "overloaded"}
    assert refusal_flaws({"retry-after": "2"}, body) == []
    assert refusal_flaws({"retry-after": after}, body)
    assert refusal_flaws({"retry-after": "2"}, {"error_type": "validation"})
    assert refusal_flaws({"retry-after": "2"}, body, error_type="unavailable")


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


def test_a_complete_family_has_one_process_of_each_kind() -> None:
    assert members(*ALL).is_complete(2)
    assert members(*ALL).pids() == {0, 1, 2}
    assert not members(*ALL).is_complete(1)
    for missing in range(len(ALL)):
        assert not members(*ALL[:missing], *ALL[missing + 1 :]).is_complete(2)


@pytest.mark.parametrize("further", [*ALL, "ended without a wait", "sh -c something"])
def test_extra_processes_make_it_incomplete(further: str) -> None:
    assert not members(*ALL, further).is_complete(2)


def test_a_second_router_that_waits_is_no_router_until_it_has_the_name_of_one() -> None:
    successor = f"{ALL[0]} --is-successor"
    assert members(*ALL, successor).is_complete(2)
    assert not members(*ALL, successor, successor).is_complete(2)
    assert not members(successor, *ALL[1:]).is_complete(2)
    found = members(*ALL[1:])
    found.add(9, successor, NAME.decode())
    assert found.is_complete(2)
    assert 9 in found.pids()


def test_all_move_once_the_last_stream_that_was_held_up_does() -> None:
    streams = [
        [0.1, 0.2, 5.0, 5.1],
        [0.1, 5.3, 5.4],
        [0.1, 0.2],  # Had ended.
        [7.0, 7.1],  # Had not begun.
        [],
    ]
    assert all_moving_at(streams, resumed=5.0, until=9.0) == 5.3


def test_a_pause_is_measured_from_the_fault_and_over_the_streams_that_ran() -> None:
    arrivals = Arrivals()
    for stream, now in ((1, 90.0), (2, 90.1), (3, 90.2)):
        arrivals.token(stream, now)
    arrivals.end(3)
    arrivals.start(100.0)
    for stream, now in ((1, 100.5), (1, 107.0), (4, 107.1), (2, 107.25), (1, 107.5)):
        arrivals.token(stream, now)
    arrivals.recovered(106.9)
    arrivals.token(1, 120.0)
    pause = arrivals.pause()
    assert pause is not None
    assert (pause.silence, pause.first_token, pause.all_moving) == (6.5, 7.0, 7.25)
    assert arrivals.num_tokens == 6
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
