"""The parts of text completions: echoes of any tokenizer, names of tokens, candidates."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_router.api.chat.choice import ChoiceText
from millrace_router.api.openai.completion_text import (
    CompletionLogprobs,
    CompletionText,
    Echo,
    Style,
    echo_of,
)
from millrace_router.request.dialect import TGI
from millrace_router.request.events import PromptLogprobs, Token, TokenEvent
from millrace_router.request.request import FinishReason
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_testing.router.edge import finished, token_event
from millrace_testing.text.texts import KINDS, tokenizer

BYTES = tokenizer("byte_level")
TEXT = "Hello 日本, Größe 👩‍💻 <|end|>!"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_text_comes_back_as_it_was_with_the_places_of_its_tokens(kind: str) -> None:
    echo = await echo_of(tokenizer(kind), TEXT)
    ids = tokenizer(kind).encode(TEXT)
    assert echo.text == TEXT
    assert len(echo.starts) == len(ids)
    assert list(echo.starts) == sorted(echo.starts)
    assert all(0 <= start <= len(TEXT) for start in echo.starts)


@pytest.mark.parametrize("kind", KINDS)
async def test_token_ids_come_back_as_what_they_decode_to(kind: str) -> None:
    text = "hello world, the cat sat"
    ids = tokenizer(kind).encode(text)
    echo = await echo_of(tokenizer(kind), ids)
    assert echo.text == tokenizer(kind).decode(ids, skip_special_tokens=True)
    assert list(echo.starts) == sorted(echo.starts)


async def test_special_tokens_have_a_place_and_no_text() -> None:
    ids = (*BYTES.encode("Hello"), 0, *BYTES.encode(" world"))
    echo = await echo_of(BYTES, ids)
    assert echo.text == "Hello world"
    places = [echo.starts[ids.index(0)], echo.starts[ids.index(0) + 1]]
    assert places == [5, 5]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30))
def test_both_forms_of_a_prompt_have_the_same_echo(text: str) -> None:
    ids = BYTES.encode(text)
    by_text, by_ids = (asyncio.run(echo_of(BYTES, form)) for form in (text, ids))
    assert by_ids.text == by_text.text
    for start, other in zip(by_text.starts, by_ids.starts, strict=True):
        # A token within a character belongs to it: by its text where it begins, by its bytes where it is whole.
        assert abs(start - other) <= 1


def test_tokens_within_a_character_are_called_by_their_bytes() -> None:
    ids = BYTES.encode("\N{PILE OF POO}")
    assert len(ids) > 1
    names = [BYTES.token_name(id_) for id_ in ids]
    assert all(name.startswith("bytes:\\x") for name in names)
    joined = "".join(name.removeprefix("bytes:") for name in names)
    assert bytes.fromhex(joined.replace("\\x", "")).decode() == "\N{PILE OF POO}"
    assert BYTES.token_name(0) == "<|end|>"


def prompt_of(columns: list[list[tuple[int, float]]]) -> PromptLogprobs:
    flat = [pair for column in columns for pair in column]
    ids = tuple(column[-1][0] for column in columns)
    logprobs = tuple(column[-1][1] for column in columns)
    return PromptLogprobs(ids, logprobs, [id_ for id_, _ in flat], [value for _, value in flat])


def test_a_prompts_first_token_has_neither_log_probability_nor_candidates() -> None:
    hello, world = BYTES.encode("he")[0], BYTES.encode("wo")[0]
    prompt = prompt_of([[(0, math.nan), (hello, math.nan)], [(hello, -0.1), (world, -2.5)]])
    columns = CompletionLogprobs(BYTES, 1).prompt(prompt, Echo("hewo", [0, 2]))
    assert columns["token_logprobs"] == [None, -2.5]
    assert columns["top_logprobs"] == [
        None,
        {BYTES.token_name(hello): pytest.approx(-0.1), BYTES.token_name(world): -2.5},
    ]
    assert columns["text_offset"] == [0, 2]


def event(*candidates: tuple[int, str, float], **fields: Any) -> Any:
    """A token, the first of `candidates`."""
    made = token_event(fields.pop("index", 1), "", **fields)
    top = tuple(Token(id_, text, logprob, special=False) for id_, text, logprob in candidates)
    made.token, made.top_tokens = top[0], top[1:]
    return made


def test_the_token_comes_with_only_the_requested_candidates() -> None:
    a, b, c = (BYTES.encode(letter)[0] for letter in "abc")
    tied = event((c, "c", -3.0), (a, "a", -1.0), (b, "b", -1.0))
    assert CompletionLogprobs(BYTES, 1).token(tied, 7) == {
        "tokens": ["c"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"a": -1.0, "c": -3.0}],
        "text_offset": [7],
    }


def test_of_tokens_called_alike_the_likeliest_stands_in_the_map() -> None:
    unknown = 10**6
    alike = event((unknown, "", -4.0), (unknown + 1, "", -1.0), (unknown + 2, "", -2.0))
    columns = CompletionLogprobs(BYTES, 2).token(alike, 0)
    assert columns["top_logprobs"] == [{"": -1.0}]
    assert columns["token_logprobs"] == [-4.0]


def test_infinite_log_probabilities_are_very_small_ones() -> None:
    columns = CompletionLogprobs(BYTES, 0).token(event((5, "x", -math.inf)), 0)
    assert columns["token_logprobs"] == [-9999.0]


def test_places_follow_the_text_that_was_generated_not_the_text_that_is_shown() -> None:
    """While a stop string may be beginning its text is held back, and the token has its place all the same."""
    a, stop = BYTES.encode("a")[0], BYTES.encode("b")[0]
    style = Style(stop_sequences=["bb"], logprobs=CompletionLogprobs(BYTES, 0))
    text = CompletionText(style, Echo("12345", [0]))
    end = finished("abab", 4, reason=FinishReason.EOS_TOKEN)
    plan = [(a, "a"), (stop, "b"), (a, "a"), (stop, "b")]
    pieces = [
        text.push(event((id_, letter, -1.0), index=i, finished=end if i == 4 else None))
        for i, (id_, letter) in enumerate(plan, start=1)
    ]
    assert [piece.text for piece in pieces] == ["a", "", "ba", "b"]
    offsets = [piece.logprobs["text_offset"][0] for piece in pieces if piece.logprobs]
    assert offsets == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"\xe6", b"a", b"b"], [0, 1, 2]),
        ([b"x", b"\xe6", b"\x97", b"\xa5", b"y"], [0, 1, 1, 1, 2]),
        ([b"\xe6", b"\x97", b"\xe6", b"\x97", b"\xa5", b"z"], [0, 0, 1, 1, 1, 2]),
        ([b"\xe6", b"\xe6"], [0, 1]),
        ([b"\xef", b"\xbf", b"\xbd", b"a"], [0, 0, 0, 1]),
        ([b"\xa5", b"\xa5", b"a"], [0, 1, 2]),
    ],
    ids=["unfinished", "finished", "anew", "last", "a-replacement-itself", "never-begun"],
)
def test_places_are_those_in_the_text_where_characters_are_not_finished(
    parts: list[bytes], expected: list[int]
) -> None:
    ids_of = {BYTES.token_bytes(id_): id_ for id_ in reversed(range(1, 300))}
    steps = IncrementalDetokenizer(BYTES, ())
    text = CompletionText(Style(logprobs=CompletionLogprobs(BYTES, 0)))
    pieces = []
    for index, part in enumerate(parts, start=1):
        added = steps.step(ids_of[part])
        if index == len(parts):
            added += steps.flush()
        pieces.append(text.push(event((ids_of[part], added, -1.0), index=index)))
    assert "".join(piece.text for piece in pieces) == b"".join(parts).decode(errors="replace")
    offsets = [piece.logprobs["text_offset"][0] for piece in pieces if piece.logprobs]
    assert offsets == expected


def test_a_special_token_that_is_shown_begins_after_an_unfinished_character() -> None:
    style = Style(logprobs=CompletionLogprobs(BYTES, 0), dialect=TGI, streams=True)
    text = CompletionText(style)
    (unfinished,) = (id_ for id_ in range(1, 300) if BYTES.token_bytes(id_) == b"\xe6")
    text.push(event((unfinished, "", -1.0), index=1))
    token = Token(id=0, text="\ufffd<|end|>", logprob=-1.0, special=True)
    piece = text.push(TokenEvent(2, token))
    assert piece.logprobs is not None
    assert piece.logprobs["text_offset"] == [1]


@pytest.mark.parametrize("text", [CompletionText(Style()), ChoiceText([])])
def test_a_character_that_a_special_token_cuts_short_is_shown(
    text: CompletionText | ChoiceText,
) -> None:
    token = Token(id=0, text="\ufffd<|end|>", logprob=-1.0, special=True)
    assert text.push(TokenEvent(1, token)).text == "\ufffd"
