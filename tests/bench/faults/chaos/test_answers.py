"""Whether an answer is whole and right: each check on answers that are, and on ones that are not."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import orjson
import pytest
from bench.faults.chaos.answers import (
    Answer,
    EventReader,
    difference,
    flaws,
    nearest,
    prefix_difference,
    stable,
)
from bench.faults.chaos.population import Request

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


def test_a_stream_with_two_ends_is_flawed() -> None:
    answer = native()
    answer.events[0]["generated_text"] = "early"
    assert any("2 ends" in flaw for flaw in flaws(NATIVE, answer))


def test_an_error_in_a_stream_is_a_flaw() -> None:
    answer = native()
    answer.events.append({"error": "gone", "error_type": "generation"})
    assert flaws(NATIVE, answer)


def test_another_status_is_a_flaw() -> None:
    assert flaws(WHOLE, Answer(status=424, events=[{"error": "x"}]))
    assert flaws(NATIVE, Answer(status=200))


@pytest.mark.parametrize("num_done", [0, 2])
def test_openai_streams_end_once(num_done: int) -> None:
    answer = openai()
    answer.num_done = num_done
    assert any("[DONE]" in flaw for flaw in flaws(OPENAI, answer))


def test_each_choice_ends_once() -> None:
    answer = openai()
    answer.events.append(chunk(1, "c"))
    assert any("choice 1 ended 0 times" in flaw for flaw in flaws(OPENAI, answer))


def test_names_and_times_do_not_count() -> None:
    assert difference(openai(id_="cmpl-2"), openai()) is None
    assert stable({"usage": {"prompt_tokens_details": {"cached_tokens": 9}}, "created": 4}) == {
        "usage": {}
    }


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


def test_choices_may_interleave_as_they_like() -> None:
    one = Answer(events=[chunk(0, "a"), chunk(1, "x"), chunk(0, "b"), chunk(1, "y")])
    other = Answer(events=[chunk(1, "x"), chunk(0, "a"), chunk(0, "b"), chunk(1, "y")])
    assert difference(one, other) is None
    other.events.reverse()
    assert difference(one, other) is not None


def test_a_beginning_is_right_and_a_wrong_one_is_not() -> None:
    head = Answer(events=native().events[:2])
    assert prefix_difference(head, native()) is None
    wrong = deepcopy(head)
    wrong.events[0]["token"]["id"] = 0
    assert prefix_difference(wrong, native()) is not None
    assert prefix_difference(native(tokens=4), native(tokens=3)) is not None


def test_beginnings_of_several_choices() -> None:
    reference = Answer(events=[chunk(0, "a"), chunk(0, "b"), chunk(1, "x"), chunk(1, "y")])
    assert prefix_difference(Answer(events=[chunk(1, "x"), chunk(0, "a")]), reference) is None
    assert prefix_difference(Answer(events=[chunk(1, "z")]), reference) is not None


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


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(orjson.JSONDecodeError):
        Answer().take(b"{")
