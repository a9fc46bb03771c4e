"""Text completions: prompts in all their forms, the echo, log probabilities, scores without a generation, streams."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from millrace_router.errors import GenerationError
from millrace_router.request.events import PromptLogprobs, Token
from millrace_router.request.request import FinishReason, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import LIMITS, Edge, finished, limits_with, serving, token_event

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


async def answer_of(edge: Edge, **body: Any) -> dict[str, Any]:
    status, answer, _ = await edge.post(URL, body)
    assert status == 200, answer
    return dict(answer)


async def chunks_of(edge: Edge, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    async with edge.client.post(edge.url + URL, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    *events, done = text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_fakes_are_what_the_tests_take_them_for() -> None:
    request = ValidRequest(
        input_ids=(2, 4), max_new_tokens=1, prefill_logprobs=True, prompt_top_n_tokens=2
    )
    prompt = scores(request)
    assert list(prompt.candidates(1)) == [(3, -0.5), (4, -1.0)]
    assert not LIMITS.prefill_logprobs


async def test_the_echo_has_the_prompts_log_probabilities_before_those_of_the_answer() -> None:
    async with serving(generate) as edge:
        answer = await answer_of(edge, **SCORED, max_tokens=3)
        (request,) = edge.batcher.requests
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "hello wörld a hello world",
        "logprobs": {
            "tokens": [" hello", " wörld", " a", " hello", " world", " </s>"],
            "token_logprobs": [None, -1.0, -2.0, -0.25, -0.5, -0.75],
            "top_logprobs": [
                None,
                {" world": -0.5, " wörld": -1.0},
                {" 日本": -1.5, " a": -2.0},
                {" hello": -0.25, " [UNK]": -3.0},
                {" world": -0.5, " [UNK]": -3.0},
                {" </s>": -0.75, " [UNK]": -3.0},
            ],
            "text_offset": [0, 6, 12, 13, 19, 25],
        },
        "finish_reason": "stop",
    }
    assert (request.prefill_logprobs, request.prompt_top_n_tokens) == (True, 2)
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_harness_that_scores_finds_what_it_reads() -> None:
    """lm-eval ignores the context, and the token generated after the prompt."""
    async with serving(generate) as edge:
        body = {"echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
        answer = await answer_of(edge, prompt=[[2, 3, 5], [4, 4]], model="m", **body)
    for choice, length in zip(answer["choices"], (3, 2), strict=True):
        columns = choice["logprobs"]
        assert columns["token_logprobs"][0] is None
        assert len(columns["token_logprobs"]) == len(columns["top_logprobs"]) == length + 1
        continuation = columns["token_logprobs"][1:-1]
        assert continuation == [-float(i) for i in range(1, length)]
        best = [max(top.values()) for top in columns["top_logprobs"][1:-1]]
        assert best == [logprob + 0.5 for logprob in continuation]


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
        chunks = await chunks_of(edge, **body)
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
        chunks = await chunks_of(edge, **SCORED, n=2, max_tokens=2)
    texts: list[list[str]] = [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]].append(choice["text"])
    assert texts == [["hello wörld a", " hello", " world"]] * 2


async def test_the_echo_is_a_separate_chunk_before_the_first_token() -> None:
    async with serving(generate) as edge:
        texts = [
            chunk["choices"][0]["text"]
            for chunk in await chunks_of(edge, prompt="hello", echo=True, max_tokens=2)
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
        chunks = await chunks_of(
            edge, prompt="hello a", echo=True, max_tokens=3, stream_options=options
        )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 1, 2, 3] + [3] * include_usage
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
    assert chunks[-1]["usage"]["total_tokens"] == 5
    assert bool(chunks[-1]["choices"]) != include_usage


async def test_a_strict_stream_shows_special_tokens_and_ends_in_tgis_words() -> None:
    async with serving(generate, strict_tgi=True) as edge:
        chunks = await chunks_of(edge, prompt="hello", max_tokens=3)
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
        chunks = await chunks_of(edge, prompt="a", stop=[" world"])
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
