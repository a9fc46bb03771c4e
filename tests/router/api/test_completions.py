"""Text completions: prompts in all their forms, the echo, log probabilities, scores without a generation, streams."""

from __future__ import annotations

import asyncio
import json
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
from millrace_router.api.openai.render import prompt_logprobs_json
from millrace_router.errors import GenerationError
from millrace_router.request.limits import TGI
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import PromptLogprobs, Token, TokenEvent, TokenStream
from millrace_router.text.detokenizer import IncrementalDetokenizer
from millrace_testing.router.edge import (
    LIMITS,
    Edge,
    echo,
    finished,
    limits_with,
    serving,
    token_event,
    word_tokenizer,
)
from millrace_testing.text.texts import KINDS, tokenizer

URL = "/v1/completions"
HELLO, WORLD, WOERLD = 2, 3, 4
EOS = 1
SCORED = {"prompt": "hello wörld a", "echo": True, "logprobs": 2}


def scores(request: ValidRequest) -> PromptLogprobs:
    """-1, -2 … for the tokens of a prompt; before each the token before it in the vocabulary, more likely by a half."""
    ids = request.input_ids
    logprobs = (math.nan, *(-float(i) for i in range(1, len(ids))))
    count = request.prompt_top_n_tokens
    columns: list[tuple[int, float]] = [(0, math.nan)] * count
    for id_, logprob in zip(ids[1:], logprobs[1:], strict=True):
        columns += [(id_ - 1, logprob + 0.5), (id_, logprob), (0, -9.0)][:count]
    return PromptLogprobs(
        ids, logprobs, [id_ for id_, _ in columns], [logprob for _, logprob in columns]
    )


def generate(request: ValidRequest, stream: TokenStream) -> None:
    """`hello world</s>`, each with a candidate that is less likely, or less of it."""
    stream.batched_at = stream.queued_at
    if request.prefill_logprobs:
        stream.prompt_logprobs = scores(request)
    plan = [(HELLO, " hello"), (WORLD, " world"), (EOS, "</s>")][: request.max_new_tokens]
    for index, (id_, text) in enumerate(plan, start=1):
        reason = FinishReason.EOS_TOKEN if id_ == EOS else FinishReason.LENGTH
        end = finished(" hello world", index, reason=reason) if index == len(plan) else None
        event = token_event(index, text, logprob=-0.25 * index, finished=end)
        event.token = Token(id_, text, -0.25 * index, special=id_ == EOS)
        likeliest = (event.token, Token(0, "[UNK]", -3.0, special=False))
        event.top_tokens = likeliest[: request.top_n_tokens]
        stream.token(event)


async def answer_of(edge: Edge, **body: Any) -> Any:
    return await edge.answer(URL, body)


async def test_the_echo_has_the_prompts_log_probabilities_before_those_of_the_answer() -> None:
    async with serving(generate) as edge:
        answer = await answer_of(edge, **SCORED, max_tokens=3)
        (request,) = edge.batcher.requests
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "hello wörld a hello world",
        "logprobs": {
            "tokens": [" hello", " wörld", " a", " hello", " world"],
            "token_logprobs": [None, -1.0, -2.0, -0.25, -0.5],
            "top_logprobs": [
                None,
                {" world": -0.5, " wörld": -1.0},
                {" 日本": -1.5, " a": -2.0},
                {" hello": -0.25, " [UNK]": -3.0},
                {" world": -0.5, " [UNK]": -3.0},
            ],
            "text_offset": [0, 6, 12, 13, 19],
        },
        "finish_reason": "stop",
    }
    assert (request.prefill_logprobs, request.prompt_top_n_tokens) == (True, 2)
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("logprobs", [None, 0, 1])
async def test_only_the_prompt_is_scored_when_nothing_is_to_be_generated(
    logprobs: int | None,
) -> None:
    async with serving(generate) as edge:
        answer = await answer_of(
            edge, prompt="hello world", echo=True, max_tokens=0, logprobs=logprobs, min_tokens=0
        )
        (request,) = edge.batcher.requests
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello world", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert request.max_new_tokens == 1
    if logprobs is None:
        assert choice["logprobs"] is None
    else:
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 1 + logprobs


async def test_prompts_are_scored_only_when_they_come_back_with_log_probabilities() -> None:
    async with serving(generate) as edge:
        echoed = await answer_of(edge, prompt="hello", echo=True, max_tokens=2)
        told = await answer_of(edge, prompt="hello", logprobs=1, max_tokens=2)
        assert [request.prefill_logprobs for request in edge.batcher.requests] == [False, False]
    assert echoed["choices"][0]["text"] == "hello hello world"
    assert echoed["choices"][0]["logprobs"] is None
    assert told["choices"][0]["logprobs"] == {
        "tokens": [" hello", " world"],
        "token_logprobs": [-0.25, -0.5],
        "top_logprobs": [{" hello": -0.25}, {" world": -0.5}],
        "text_offset": [0, 6],
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello world", [(2, 3)]),
        (["hello", "world a"], [(2,), (3, 6)]),
        ([2, 1, 4], [(2, 1, 4)]),
        ([[2], [3, 3]], [(2,), (3, 3)]),
    ],
    ids=["text", "texts", "ids", "id-lists"],
)
async def test_prompts_come_in_four_forms(prompt: object, expected: list[Any]) -> None:
    async with serving(generate) as edge:
        answer = await answer_of(edge, prompt=prompt, max_tokens=1)
        assert [request.input_ids for request in edge.batcher.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_token_ids_come_back_as_text_without_special_tokens() -> None:
    async with serving(generate) as edge:
        answer = await answer_of(
            edge, prompt=[HELLO, EOS, WOERLD], echo=True, logprobs=0, max_tokens=1
        )
    (choice,) = answer["choices"]
    assert choice["text"] == "hello wörld hello"
    assert choice["logprobs"]["tokens"] == [" hello", " </s>", " wörld", " hello"]
    assert choice["logprobs"]["text_offset"] == [0, 5, 5, 11]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [2, 8]}, "`prompt` contains token id 8, but the model knows only 8"),
        ({"prompt": [[2], [3, 99]]}, "`prompt` contains token id 99"),
        ({"prompt": [-1]}, "`prompt[0]` must be "),
        ({"prompt": [2**32]}, "`prompt[0]` must be "),
        ({"prompt": [2, True]}, "`prompt[1]` must be an integer"),
        ({"prompt": [2, "a"]}, "`prompt[1]` must be an integer"),
        ({"prompt": ["a", 2]}, "`prompt[1]` must be a string"),
        ({"prompt": [[2], "a"]}, "`prompt[1]` must "),
        ({"prompt": [[2], []]}, "`prompt[1]` must "),
        ({"prompt": [[]]}, "`prompt[0]` must have"),
        ({"prompt": []}, "`prompt` must have at least"),
        ({"prompt": {"a": 1}}, "`prompt` must be a string"),
        ({"prompt": None}, "`prompt` must be a string"),
        ({"prompt": [2] * 9}, "must have less than 8 tokens"),
        ({"prompt": [[2]] * 5}, "maximum allowed batch size of 4"),
        ({"prompt": "a", "logprobs": -1}, "`logprobs` must be >= 0 and <= 5. Given: -1"),
        ({"prompt": "a", "logprobs": 6}, "`logprobs` must be >= 0 and <= 5. Given: 6"),
        ({"prompt": "a", "max_tokens": 0}, "strictly positive without `echo`"),
        ({"prompt": "a", "suffix": "z"}, "Suffix is not supported"),
        ({"prompt": "a", "best_of": 3}, "`best_of` must be > 0 and <= 2"),
        ({"prompt": ""}, "`prompt` cannot be empty"),
        ({"prompt": "a", "temperature": 0, "top_p": -1}, "`top_p` must be > 0.0"),
        ({"prompt": "a", "temperature": 0, "min_p": 2}, "`min_p` must be >= 0.0"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
async def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    async with serving(generate) as edge:
        status, answer, _ = await edge.post(URL, {"max_tokens": 1, **fields})
        assert edge.services.infer.permits.free == LIMITS.max_concurrent_requests
        assert not edge.batcher.requests
    assert status == 422
    assert message in answer["error"]["message"]


async def test_every_choice_of_a_prompt_has_the_echo_that_the_first_has_scored() -> None:
    async with serving(generate) as edge:
        answer = await answer_of(edge, **SCORED, n=3, max_tokens=1)
        scored = [request.prefill_logprobs for request in edge.batcher.requests]
    assert scored == [True, False, False]
    assert len({json.dumps(choice["logprobs"]) for choice in answer["choices"]}) == 1
    assert {choice["text"] for choice in answer["choices"]} == {"hello wörld a hello"}
    assert answer["usage"]["prompt_tokens"] == 3


async def test_stop_strings_are_searched_only_in_the_answer() -> None:
    async with serving(generate) as edge:
        answer = await answer_of(edge, prompt="hello", echo=True, stop=" wor", logprobs=0)
        (request,) = edge.batcher.requests
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello hello", "stop")
    assert choice["logprobs"]["text_offset"] == [0, 5, 11]
    assert request.stop_sequences == (" wor",)


async def test_the_least_number_of_tokens_is_passed_on() -> None:
    async with serving(generate) as edge:
        await answer_of(edge, prompt="hello", min_tokens=2, max_tokens=3)
        assert edge.batcher.requests[0].min_new_tokens == 2


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("prompt", ["hello wörld a", [[2, 4], [3]]], ids=["text", "id-lists"])
async def test_a_stream_adds_up_to_the_answer_in_one_piece(prompt: object, max_tokens: int) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": 2}
    async with serving(generate) as edge:
        whole = await answer_of(edge, **body)
        chunks = await edge.chunks(URL, body)
    for expected in whole["choices"]:
        parts = [
            choice
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == expected["index"]
        ]
        assert "".join(part["text"] for part in parts) == expected["text"]
        for name, column in expected["logprobs"].items():
            assert [one for part in parts for one in part["logprobs"][name]] == column
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [expected["finish_reason"]]
    usages = [chunk["usage"] for chunk in chunks if "usage" in chunk]
    for name in ("prompt_tokens", "completion_tokens"):
        assert sum(usage[name] for usage in usages) == whole["usage"][name]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_choice_that_overtakes_the_scoring_one_waits_for_its_echo(*, fails: bool) -> None:
    begun: list[tuple[ValidRequest, TokenStream]] = []

    def overtake(request: ValidRequest, stream: TokenStream) -> None:
        begun.append((request, stream))
        if len(begun) == 2:
            generate(*begun[1])
            if fails:
                begun[0][1].fail(GenerationError("gone"))
            else:
                generate(*begun[0])

    async with serving(overtake) as edge:
        if fails:
            status, _, _ = await edge.post(URL, {**SCORED, "n": 2, "stream": True})
            assert status == 424
            return
        chunks = await edge.chunks(URL, {**SCORED, "n": 2, "max_tokens": 2})
    texts: list[list[str]] = [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]].append(choice["text"])
    assert texts == [["hello wörld a", " hello", " world"]] * 2


async def test_the_echo_is_a_separate_chunk_before_the_first_token() -> None:
    async with serving(generate) as edge:
        texts = [
            chunk["choices"][0]["text"]
            for chunk in await edge.chunks(URL, {"prompt": "hello", "echo": True, "max_tokens": 2})
        ]
    assert texts == ["hello", " hello", " world"]


async def test_a_scored_stream_that_fails_before_its_first_token_has_a_status() -> None:
    def fail(request: ValidRequest, stream: TokenStream) -> None:
        stream.prompt_logprobs = scores(request)
        stream.fail(GenerationError("gone"))

    async with serving(fail) as edge:
        status, answer, _ = await edge.post(URL, {**SCORED, "stream": True})
    assert (status, answer["error_type"]) == (424, "generation")


@pytest.mark.parametrize("include_usage", [False, True])
async def test_every_chunk_has_usage_on_request(*, include_usage: bool) -> None:
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    async with serving(generate) as edge:
        chunks = await edge.chunks(
            URL, {"prompt": "hello a", "echo": True, "max_tokens": 3, "stream_options": options}
        )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 1, 2, 3] + [3] * include_usage
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert bool(chunks[-1]["choices"]) != include_usage


async def test_a_strict_stream_shows_special_tokens_and_ends_in_tgis_words() -> None:
    async with serving(generate, strict_tgi=True) as edge:
        chunks = await edge.chunks(URL, {"prompt": "hello", "max_tokens": 3})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == [" hello", " world", "</s>"]
    assert [choice["finish_reason"] for choice in choices] == ["", "", "eos_token"]
    assert {chunk["id"] for chunk in chunks} == {""}


@pytest.mark.parametrize(
    ("strict_tgi", "expected"),
    [(False, (" hello", "stop")), (True, (" hello world", "stop_sequence"))],
    ids=["default", "strict"],
)
async def test_a_stop_string_stays_where_tgi_is_followed(
    strict_tgi: bool,
    expected: tuple[str, str],
) -> None:
    def stop(_: ValidRequest, stream: TokenStream) -> None:
        stream.token(token_event(1, " hello"))
        end = finished(" hello world", 2, reason=FinishReason.STOP_SEQUENCE)
        stream.token(token_event(2, " world", finished=end))

    async with serving(stop, strict_tgi=strict_tgi) as edge:
        answer = await answer_of(edge, prompt="a", stop=[" world"])
        chunks = await edge.chunks(URL, {"prompt": "a", "stop": [" world"]})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == expected
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == expected[1]


async def test_the_end_of_a_strict_answer_in_one_piece_is_a_stop() -> None:
    async with serving(generate, strict_tgi=True) as edge:
        answer = await answer_of(edge, prompt="hello", max_tokens=3)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" hello world", "stop")


async def test_texts_have_character_offsets_and_ids_have_none() -> None:
    async with serving(generate) as edge:
        lengths = []
        for prompt in ("hello wörld", [2, 3]):
            _, _, response = await edge.post(URL, {"prompt": prompt, "max_tokens": 1})
            lengths.append(response.headers["x-compute-characters"])
    assert lengths == ["11", "0"]


async def test_native_routes_still_need_the_operators_leave() -> None:
    asked = {"inputs": "hello a", "parameters": {"decoder_input_details": True}}
    for leave, expected in ((False, 0), (True, 2)):
        async with serving(generate, limits=limits_with(prefill_logprobs=leave)) as edge:
            _, answer, _ = await edge.post("/generate", asked)
            (request,) = edge.batcher.requests
        assert len(answer["details"]["prefill"]) == expected
        assert request.prompt_top_n_tokens == 0


async def test_of_the_native_best_of_several_each_has_the_prompt_that_was_scored_once() -> None:
    parameters = {"best_of": 2, "do_sample": True, "details": True, "decoder_input_details": True}
    async with serving(generate, limits=limits_with(prefill_logprobs=True)) as edge:
        _, answer, _ = await edge.post("/generate", {"inputs": "a b", "parameters": parameters})
        scored = [request.prefill_logprobs for request in edge.batcher.requests]
    assert scored == [True, False]
    (other,) = answer["details"]["best_of_sequences"]
    assert other["prefill"] == answer["details"]["prefill"]
    assert [token["logprob"] for token in other["prefill"]] == [None, -1.0]


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
async def test_token_ids_come_back_as_their_decoded_text(kind: str) -> None:
    text = "hello world, the cat sat"
    ids = tokenizer(kind).encode(text)
    echo = await echo_of(tokenizer(kind), ids)
    assert echo.text == tokenizer(kind).decode(ids, skip_special_tokens=True)
    assert list(echo.starts) == sorted(echo.starts)


async def test_special_tokens_have_an_offset_and_no_text() -> None:
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


def test_the_map_has_the_likeliest_of_tokens_with_the_same_text() -> None:
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


WIDE = limits_with(max_input_tokens=100, max_total_tokens=200)
TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello world a"}]},
    "/v1/completions": {"prompt": "hello world a"},
}


def test_the_token_and_the_likeliest_have_their_ranks() -> None:
    nan = math.nan
    prompt = PromptLogprobs(
        (2, 3, 6), (nan, -0.5, -math.inf), [0, 0, 3, 6, 2, 3], [nan, nan, -0.5, -1.5, -0.25, -2.5]
    )
    tokenizer = word_tokenizer()
    found = prompt_logprobs_json(prompt, 2, tokenizer)
    tokenizer.close()
    assert found == [
        None,
        {
            "3": {"logprob": -0.5, "rank": 1, "decoded_token": " world"},
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": " a"},
        },
        {
            "6": {"logprob": -9999.0, "rank": None, "decoded_token": " a"},
            "2": {"logprob": -0.25, "rank": 1, "decoded_token": " hello"},
            "3": {"logprob": -2.5, "rank": 2, "decoded_token": " world"},
        },
    ]


@pytest.mark.parametrize("route", BODIES)
async def test_answers_have_prompt_logprobs_only_if_requested(route: str) -> None:
    async with serving(echo, limits=WIDE, template=TEMPLATE) as edge:
        body = {**BODIES[route], "max_tokens": 1}
        _, plain, _ = await edge.post(route, body)
        assert "prompt_logprobs" not in str(plain)
        _, answer, _ = await edge.post(route, {**body, "prompt_logprobs": 0})
        held = answer.get("prompt_logprobs", answer["choices"][0].get("prompt_logprobs"))
        assert held[0] is None
        assert [{id_: one["logprob"] for id_, one in each.items()} for each in held[1:]] == [
            {"3": -1.0},
            {"6": -1.0},
        ]
        request = edge.batcher.requests[-1]
        assert (request.prefill_logprobs, request.prompt_top_n_tokens) == (True, 0)
        for wrong in ({"prompt_logprobs": 6}, {"prompt_logprobs": -1}):
            assert (await edge.post(route, body | wrong))[0] == 422
        status, text, _ = await edge.post(route, body | {"prompt_logprobs": 1, "stream": True})
        assert (status, "`prompt_logprobs`" in str(text)) == (422, True)
