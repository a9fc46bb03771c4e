"""Texts that are closed within a limit: whole and valid, and the same however they are computed."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import jsonschema
import numpy as np
import pytest
from bench.structured_output.everyday import everyday
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_shard.structured_output.closing import short_ending
from millrace_shard.structured_output.mask_computer import MaskRequest
from millrace_testing.engines.grammars import Words, allowed, lark, new_manager, regex, schema, walk

MERGES = [
    b'":',
    b'", "',
    b'"}',
    b'"]',
    b"]}",
    b"},",
    b"the ",
    b"12",
    b"name",
    b"true",
    b"\xc3\xa9",
    b"</think>",
]
WORDS = Words([*(bytes([byte]) for byte in range(32, 127)), *MERGES, b"\xc3", b"\xa9"], size=160)
CLOSER = WORDS.tokens.index(b"</think>")
EVERYDAY = [
    {**of, "additionalProperties": False} for _, of in everyday() if of.get("type") == "object"
]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 18},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string", "minLength": 5}},
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
}
LIMIT = 120


@dataclass(frozen=True)
class Run:
    """What a sequence has generated."""

    ids: tuple[int, ...]
    has_ended: bool
    is_closed: bool


def generate(
    source: Any, limit: int, seed: int, *, guess: tuple[int, ...] = (), most: int = 1, cut: int = -1
) -> Run:
    """Choose by seed and place, as samplers do, in steps with drafts from `guess`; replay once after `cut` tokens."""
    manager, rng = new_manager(WORDS, overlap=False), random.Random(f"{seed}/drafts")
    grammar = schema(json.dumps(source)) if isinstance(source, dict) else source
    ids: list[int] = []
    manager.admit(0, grammar, np.array(ids, dtype=np.int64), close_within=limit)
    new_tokens: list[int] = []
    is_closed = False
    while len(ids) < limit:
        if 0 <= cut <= len(ids):
            manager.drop(np.array([0]))
            manager.admit(0, grammar, np.array(ids, dtype=np.int64), close_within=limit)
            new_tokens, cut = [], -1
        drafts = [
            id_ if rng.random() < 0.9 else rng.randrange(3, 100)
            for id_ in guess[len(ids) : len(ids) + rng.randrange(4)]
        ]
        request = MaskRequest(
            slot=0,
            new_tokens=partial(tuple, new_tokens),
            drafts=drafts,
            max_jump_forward_tokens=most,
        )
        masks = manager.start([request]).result()
        assert not masks.failed
        new_tokens, taken = [], list(masks.forced[0])
        if not taken:
            for depth in range(1 + len(drafts)):
                chance = random.Random(f"{seed}/{len(ids) + depth}")
                choices = sorted(allowed(masks.bits[depth]))
                taken.append(chance.choice(choices))
                if depth == len(drafts) or drafts[depth] != taken[-1]:
                    break
            new_tokens = taken
        first = masks.num_open[0]
        for count, id_ in enumerate(taken):
            if len(ids) == limit:
                break
            ids.append(id_)
            is_closed = first is not None and count >= first
            if id_ in WORDS.eos:
                return Run(tuple(ids), True, is_closed)
    return Run(tuple(ids), False, is_closed)


def value_of(run: Run) -> object:
    return json.loads(WORDS.text(run.ids))


@pytest.mark.parametrize("source", EVERYDAY[::3])
def test_any_beginning_has_an_ending_that_completes_it(source: dict[str, Any]) -> None:
    for seed in range(4):
        matcher, rng = WORDS.matcher(schema(json.dumps(source))), random.Random(seed)
        walk(matcher, WORDS, rng, most=rng.randrange(40))
        if matcher.inner.is_accepting():
            continue
        before = matcher.copy()
        ending = short_ending(matcher.inner, WORDS.vocabulary.closing, most=400)
        assert ending is not None
        assert before.consume_all(ending)
        assert before.has_ended


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.integers(60, LIMIT))
def test_a_text_is_whole_and_valid_and_marked_if_the_limit_closed_it(seed: int, limit: int) -> None:
    run = generate(PERSON, limit, seed)
    assert run.has_ended
    jsonschema.validate(value_of(run), PERSON)
    free = generate(PERSON, 10**6, seed) if not run.is_closed else None
    assert free is None or free.ids == run.ids


@settings(max_examples=5, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    limit=st.integers(40, LIMIT),
    most=st.sampled_from([1, 3, 9]),
    cut=st.integers(-1, LIMIT),
)
def test_steps_drafts_and_replays_do_not_change_it(
    seed: int, limit: int, most: int, cut: int
) -> None:
    plain = generate(PERSON, limit, seed)
    assert generate(PERSON, limit, seed, guess=plain.ids, most=most, cut=cut) == plain


def test_a_string_that_never_ends_is_ended() -> None:
    # Of its 107 choices, one ends the string.
    runs = [generate({"type": "string"}, 30, seed) for seed in range(20)]
    assert all(run.has_ended and isinstance(value_of(run), str) for run in runs)
    assert any(run.is_closed for run in runs)
    assert all(run.is_closed == (len(run.ids) > 20) for run in runs)


@pytest.mark.parametrize("begun", ["\N{GRINNING FACE}".encode()[:n] for n in (1, 2, 3)])
def test_a_string_that_stops_within_a_character_is_ended(begun: bytes) -> None:
    words = Words([bytes([byte]) for byte in range(256)], size=280)
    matcher = words.matcher(schema(json.dumps({"type": "array", "items": {"type": "string"}})))
    assert matcher.consume_all(words.split(b'["' + begun))
    ending = short_ending(matcher.inner, words.vocabulary.closing, most=12)
    assert ending is not None
    assert len(json.loads(b'["' + begun + words.text(ending))) == 1


def test_brackets_of_any_depth_are_closed() -> None:
    tree = {"type": "array", "items": {"$ref": "#"}}
    for depth in (1, 9, 40):
        matcher = WORDS.matcher(schema(json.dumps(tree)))
        assert matcher.consume_all(WORDS.split(b"[" * depth))
        ending = short_ending(matcher.inner, WORDS.vocabulary.closing, most=60)
        assert ending is not None
        assert WORDS.text(ending) == b"]" * depth


def test_a_limit_below_the_shortest_text_changes_nothing() -> None:
    least = {"type": "string", "minLength": 50}
    assert generate(least, 20, 1).ids == generate(least, 10**6, 1).ids[:20]


def test_a_text_that_is_complete_may_go_on() -> None:
    run = generate(regex("[a-z]*"), 40, 3)
    assert not run.is_closed


def test_a_thought_is_closed_with_its_answer() -> None:
    answer = json.dumps(PERSON)
    thinks = lark(f"start: <[^0,1,{CLOSER}]>* <[{CLOSER}]> answer\nanswer: %json {answer}\n")
    runs = [generate(thinks, 80, seed) for seed in range(8)]
    for run in runs:
        assert run.has_ended
        text = WORDS.text(run.ids).decode(errors="replace")
        jsonschema.validate(json.loads(text.partition("</think>")[2]), PERSON)
    assert any(run.is_closed for run in runs)
