"""The outcomes of a poison request that count as right, and that only one prompt is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.faults.poison import (
    NUM_REQUESTS,
    PLACE,
    Found,
    bound,
    kinds,
    mark_ids,
    outcome,
    poisoned_bodies,
    problems,
)
from bench.faults.streams import Answer
from bench.harness.paths import DEMO
from tokenizers import Tokenizer

from millrace_testing.router.sse import event

RIGHT = Answer({}, events=[event(1, last=True)[len(b"data: ") : -2]], status=200)
GENERATION = '{"error":"it breaks the server","error_type":"generation"}'
REFUSED = Answer({}, status=424, error=f"BadStreamError: {GENERATION}")
SURVIVED = Found(lost=[], poisoned=REFUSED, failures=8, restarts=8, records=1, seconds=30.0)
KILL, *_, TOO_LARGE = kinds([7, 8, 9])


def test_the_poison_is_in_one_prompt() -> None:
    tokenizer, bodies = Tokenizer.from_file(str(DEMO / "tokenizer.json")), poisoned_bodies()
    assert len(bodies) == NUM_REQUESTS
    ids = mark_ids(tokenizer, bodies)
    assert tokenizer.decode(ids) in bodies[PLACE]["inputs"]
    with pytest.raises(ValueError, match=f"{PLACE}, {NUM_REQUESTS}"):
        mark_ids(tokenizer, [*bodies, bodies[PLACE]])


def test_the_bound_is_that_of_the_contract() -> None:
    assert bound(64) == 14


def test_the_test_shard_gets_the_tokens_and_the_kind_of_failure() -> None:
    assert KILL.environment == {
        "MILLRACE_TEST_POISON": "7,8,9",
        "MILLRACE_TEST_POISON_HOW": "kill",
    }


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (RIGHT, "answered"),
        (REFUSED, "424"),
        (Answer({}, status=200, error=f"BadStreamError: {GENERATION}"), "424"),
        (Answer({}, status=503, error="unavailable"), "unavailable"),
        (Answer({}, status=200, error="ClientPayloadError"), "ClientPayloadError"),
    ],
)
def test_what_the_client_of_the_poison_saw(answer: Answer, seen: str) -> None:
    assert outcome(answer) == seen


def test_a_right_outcome_has_no_problems() -> None:
    assert problems(KILL, SURVIVED, RIGHT) == []
    answered = replace(SURVIVED, poisoned=RIGHT, records=0)
    assert problems(TOO_LARGE, answered, RIGHT) == []


@pytest.mark.parametrize(
    "found",
    [
        replace(SURVIVED, lost=["stream 3: reset"]),
        replace(SURVIVED, poisoned=RIGHT),
        replace(SURVIVED, restarts=14),
        replace(SURVIVED, records=0),
        replace(SURVIVED, records=2),
    ],
)
def test_whatever_is_not_as_it_should_be_is_a_problem(found: Found) -> None:
    assert len(problems(KILL, found, RIGHT)) == 1


def test_an_answer_that_should_be_right_and_is_not_is_a_problem() -> None:
    refused = replace(SURVIVED, records=0)
    assert len(problems(TOO_LARGE, refused, RIGHT)) == 1
