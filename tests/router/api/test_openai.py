"""OpenAI's routes on a real socket: shapes, stop strings, usage, errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace_router.api.chat.choice import ChatDelta, ChoiceText
from millrace_router.api.chat.stream import ChunkTemplate
from millrace_router.api.openai.completion_stream import CompletionChunks
from millrace_router.api.openai.completion_text import CompletionDelta
from millrace_router.api.openai.render import ChatRenderer, ResponseMeta
from millrace_router.api.tgi.answers import plain_frame, stream_json
from millrace_router.engine.generation import Usage
from millrace_router.request.entry import Entry
from millrace_router.request.limits import dialect_of
from millrace_router.request.names import Names
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import Token, TokenEvent, TokenStream
from millrace_router.server.sse import event
from millrace_testing.router.edge import LIMITS, limits_with, serving
from millrace_testing.text.texts import Generations, Plan, tokenizer

TEMPLATE = "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
WIDE = limits_with(max_input_tokens=100, max_total_tokens=200)
BYTES = tokenizer("byte_level")
END = 0
USER = {"role": "user", "content": "hello world"}
LONG = {"role": "user", "content": "hello " * 250}


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text))


def generations(*plans: Plan, together: int = 1) -> Generations:
    return Generations(*plans, tokenizer=BYTES, together=together)


served = partial(serving, limits=WIDE, template=TEMPLATE)


async def test_chat_ids_are_unique_and_other_names_are_echoed() -> None:
    script = generations([END], [END])
    async with served(script) as edge:
        answers = [
            (await edge.post("/v1/chat/completions", {"model": name, "messages": [USER]}))[1]
            for name in ("dummy", "https://some/endpoint")
        ]
    assert [answer["model"] for answer in answers] == ["dummy", "https://some/endpoint"]
    assert answers[0]["id"] != answers[1]["id"]


LETTERS = st.sampled_from("ab好 ")


@settings(deadline=None, max_examples=200)
@given(
    text=st.text(LETTERS, min_size=1, max_size=20),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(0, 80), max_size=8),
)
def test_a_choice_is_the_text_up_to_the_first_stop(
    text: str, stops: list[str], cuts: set[int]
) -> None:
    """Whatever the tokens, through a real entry: bytes are cut anywhere, even inside characters."""
    byte_ids = {BYTES.token_bytes(id_): id_ for id_ in range(BYTES.vocab_size)}
    plan = [byte_ids[bytes([byte])] for byte in text.encode()]
    for cut in sorted(cuts):
        plan.insert(min(cut, len(plan)), 10**6)
    request = ValidRequest(input_ids=(5,), max_new_tokens=len(plan), stop_sequences=tuple(stops))
    entry = Entry(1, request, BYTES, frozenset({END}), block_size=16)
    any(entry.accept(id_, -1.0, ()) for id_ in plan)
    choice = ChoiceText(stops)
    shown, reason = "", None
    for token in entry.stream._early:
        piece = choice.push(token)
        shown, reason = shown + piece.text, piece.finish_reason
        if reason is not None:
            break
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, length = min(ends, default=(len(text), 0))
    assert shown == text[: end + length]
    assert reason == ("stop" if ends else "length")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, {"samples": False}),
        ({"temperature": 0.5, "top_p": 1}, {"temperature": 0.5, "top_p": 1.0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"seed": 5}, {"seed": 5}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"presence_penalty": 0}, {"presence_penalty": 0.0, "repetition_penalty": 1.0}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        (
            {"frequency_penalty": 1.5},
            {"openai_frequency_penalty": 1.5, "frequency_penalty": 0.0},
        ),
        ({"repetition_penalty": 1.25}, {"repetition_penalty": 1.25}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_sampling_is_translated(
    path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    async with served(generations([END])) as edge:
        body = {"messages": [USER], "prompt": "hello", **fields}
        await edge.answer(path, body)
        (request,) = edge.batcher.requests
    assert {name: getattr(request.sampling, name) for name in expected} == expected


async def test_nulls_unknown_fields_and_aliases_are_taken() -> None:
    everything = [
        "model", "max_tokens", "stream", "stream_options", "seed", "stop", "temperature", "top_p",
        "frequency_penalty", "presence_penalty", "n", "logit_bias", "logprobs", "top_logprobs",
        "tools", "tool_choice", "response_format", "user", "metadata", "top_k", "typical_p", "min_p",
        "parallel_tool_calls", "tool_prompt", "functions", "function_call", "min_tokens", "service_tier",
        "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "priority",
    ]  # fmt: skip
    body: dict[str, Any] = dict.fromkeys(everything)
    body |= {
        "messages": [
            {
                **USER,
                "name": None,
                "tool_calls": None,
                "tool_call_id": None,
                "function_call": None,
                "refusal": None,
                "reasoning_content": None,
            }
        ],
        "max_completion_tokens": 9,
        "max_retries": 2,
        "store": False,
        "ignore_eos": True,
        "n": 1,
        "tools": [],
        "logit_bias": {},
        "response_format": {"type": "text"},
    }
    async with served(generations([END] * 9)) as edge:
        answer = await edge.answer("/v1/chat/completions", body)
        (request,) = edge.batcher.requests
    assert (request.max_new_tokens, request.ignore_eos) == (9, True)
    assert answer["usage"]["completion_tokens"] == 9


def refused(fields: dict[str, Any], param: str | None, message: str) -> Any:
    return pytest.param(fields, param, message, id=f"{param} {message[:40]}")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        refused({"n": 99}, "n", "`n` must be > 0 and <= 3. Given: 99"),
        refused({"response_format": {"type": "json"}}, None, "grammar is not supported"),
        refused({"response_format": {"type": "yaml"}}, "response_format", "has the 'type' 'yaml'"),
        refused({"logit_bias": {"9": 1}}, "logit_bias", "`logit_bias` contains token id 9"),
        refused({"logit_bias": [1.0]}, "logit_bias", "logit_bias"),
        refused({"presence_penalty": 2.5}, "presence_penalty", "`presence_penalty` must be"),
        refused({"temperature": -1}, "temperature", "`temperature` must be >= 0.0 and <= 2.0"),
        refused({"temperature": 2.1}, "temperature", "`temperature` must be >= 0.0 and <= 2.0"),
        refused({"max_tokens": 0}, "max_tokens", "`max_tokens` must be strictly positive"),
        refused({"messages": []}, "messages", "`messages` must have at least 1 item"),
        refused({"messages": [{"role": "user", "content": None}]}, "messages[0]", "messages[0]"),
        refused({"messages": "hello"}, "messages", "`messages` must be a list"),
        refused({"max_tokens": "5"}, "max_tokens", "`max_tokens` must be an integer"),
        refused(
            {"top_logprobs": 21, "logprobs": True},
            "top_logprobs",
            "`top_logprobs` must be >= 0 and <= 20. Given: 21",
        ),
        refused({"messages": [LONG]}, "messages", "`messages` tokens + `max_tokens`"),
        refused(
            {"messages": [LONG], "max_completion_tokens": 10_000},
            "messages",
            "tokens + `max_completion_tokens`",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_chats_are_refused(
    fields: dict[str, Any], param: str | None, message: str, *, stream: bool
) -> None:
    async with served(generations()) as edge:
        body = {"messages": [USER], "stream": stream, **fields}
        got, answer, _ = await edge.post("/v1/chat/completions", body)
        assert edge.services.infer.permits.free == LIMITS.max_concurrent_requests
    assert (got, answer["error_type"]) == (422, "validation")
    detail = answer["error"]
    assert message in detail["message"]
    assert {**detail, "message": ""} == {
        "message": "",
        "type": "validation",
        "http_status_code": 422,
        "param": param,
        "code": "context_length_exceeded" if "tokens + " in message else None,
    }


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_completion_stream_interleaves_its_choices(*, include_usage: bool) -> None:
    plans = [[*ids(" one 好"), END], [*ids(" two three four"), END]]
    async with served(generations(*plans, together=2)) as edge:
        body = {"prompt": ["hello", "a b"], "stream_options": {"include_usage": include_usage}}
        *chunks, done = await edge.events("/v1/completions", body)
    assert done == "[DONE]"
    totals = chunks.pop() if include_usage else None
    texts, reasons, usages = ["", ""], [[], []], [None, None]  # type: ignore[var-annotated]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert (chunk["object"], choice["logprobs"]) == ("text_completion", None)
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]].append(choice["finish_reason"])
        usages[choice["index"]] = chunk.get("usage")
    assert texts == [" one 好", " two three four"]
    for one, plan in zip(reasons, plans, strict=True):
        assert one == [None] * (len(plan) - 1) + ["stop"]
    counts = [len(plan) for plan in plans]
    if totals is not None:
        assert usages == [None, None]
        assert totals["choices"] == []
        assert totals["usage"]["completion_tokens"] == sum(counts)
    else:
        assert [usage["completion_tokens"] for usage in usages] == counts  # type: ignore[index]
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order), "prompts take turns"


class Cached(Generations):
    """Generations whose prompts are found computed so far, one after the other."""

    def __init__(self, cached: list[int], *plans: Plan) -> None:
        super().__init__(*plans, tokenizer=BYTES)
        self._cached = iter(cached)

    def __call__(self, request: ValidRequest, stream: TokenStream) -> None:
        self.cached_tokens = next(self._cached)
        stream.predicted_queue_seconds = 0.25
        super().__call__(request, stream)


def cached_of(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def test_a_chat_s_usage_has_cached_tokens() -> None:
    url = "/v1/chat/completions"
    body: dict[str, Any] = {"messages": [USER]}
    async with served(Cached([3, 4], [END], [END])) as edge:
        _, answer, response = await edge.post(url, body)
        assert cached_of(answer["usage"]) == 3
        assert response.headers["x-cached-tokens"] == "3"
        assert response.headers["x-predicted-queue-time"] == "250"
        body = {**body, "stream_options": {"include_usage": True}}
        *_, usage, _ = await edge.events(url, body)
        assert cached_of(usage["usage"]) == 4


async def test_cached_tokens_of_several_prompts_are_added_up() -> None:
    url = "/v1/completions"
    body: dict[str, Any] = {"prompt": ["a", "b"]}
    async with served(Cached([3, 4], [END], [END])) as edge:
        _, answer, response = await edge.post(url, body)
        assert cached_of(answer["usage"]) == 7
        assert response.headers["x-cached-tokens"] == "7"
        assert response.headers["x-predicted-queue-time"] == "500"
        edge.batcher.script = Cached([3, 4], [END], [END])
        first, second, _ = await edge.events(url, body)
        assert (cached_of(first["usage"]), cached_of(second["usage"])) == (3, 4)
        edge.batcher.script = Cached([3, 4], [END], [END])
        body = {**body, "stream_options": {"include_usage": True}}
        *_, usage, _ = await edge.events(url, body)
        assert cached_of(usage["usage"]) == 7


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_terms_come_from_headers_and_body(path: str, *, stream: bool) -> None:
    body = {"stream": stream, **({"prompt": "a"} if "chat" not in path else {"messages": [USER]})}
    headers = {"x-priority": "2", "x-max-queue-ms": "100", "authorization": "Bearer mine"}
    async with served(generations([END], [END]), fairness="tenant") as edge:
        await edge.post(path, body, headers=headers)
        await edge.post(path, {**body, "priority": -10}, headers=headers)
        first, second = (request.scheduling for request in edge.batcher.requests)
        status, answer, _ = await edge.post(path, {**body, "priority": 11})
        assert (status, answer["error_type"]) == (422, "validation")
        assert "`priority` must be an integer" in answer["error"]["message"]
        assert 'tgi_request_failure{err="validation"} 1' in await edge.exposition()
    assert (first.priority, first.max_queue_seconds, second.priority) == (2, 0.1, -10)
    assert first.tenant == second.tenant != ""
    assert "mine" not in first.tenant


async def test_a_prompt_that_stalls_holds_up_no_other() -> None:
    async with served(generations([], [*ids("Hi"), END])) as edge:
        body = {"prompt": ["a", "b"], "stream": True}
        async with edge.client.post(edge.url + "/v1/completions", json=body) as response:
            line = b""
            while b'"finish_reason":"stop"' not in line:
                line = await response.content.readline()
                assert line, "the stream has ended"
        assert b'"index":1' in line


TEXTS = st.text() | st.sampled_from(
    ['"', "\\", "%b%d{}", "\0\x1f\x7f", "\u2028é好😀", "\r\n\t", ""]
)
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1.3242188])


@given(st.integers(1, 2**40), st.integers(0, 2**32 - 1), TEXTS, FLOATS, st.booleans())
@example(1, 5, "x", float("nan"), True)
def test_a_plain_token_frame_equals_the_rendered_one(
    index: int, id_: int, text: str, logprob: float, special: bool
) -> None:
    token = TokenEvent(index, Token(id_, text, logprob, special))
    assert plain_frame(token) == event(orjson.dumps(stream_json(token)))


@given(TEXTS.filter(bool), TEXTS, st.integers(0, 3), st.booleans())
def test_a_templated_chat_chunk_equals_the_rendered_one(
    text: str, model: str, index: int, strict_tgi: bool
) -> None:
    head = ResponseMeta(
        "chat.completion", "chatcmpl", model=model, fingerprint="1-native", names=Names.new()
    )
    answers = ChatRenderer(head, dialect_of(strict_tgi=strict_tgi))
    template = ChunkTemplate(lambda text: answers.text_chunk(index, text))
    (chunk,) = answers.chunks(index, ChatDelta(text, None, 1, None))
    assert template.fill(text) == orjson.dumps(chunk)
    framed = ChunkTemplate(lambda text: answers.text_chunk(index, text), frame=event)
    assert framed.fill(text) == event(orjson.dumps(chunk))


@given(TEXTS, TEXTS, st.integers(0, 3), st.booleans())
def test_a_templated_completion_chunk_equals_the_rendered_one(
    text: str, model: str, index: int, strict_tgi: bool
) -> None:
    head = ResponseMeta(
        "text_completion", "cmpl", model=model, fingerprint="1-native", names=Names.new()
    )
    chunks = CompletionChunks(
        head,
        includes_usage=False,
        continuous_usage=False,
        dialect=dialect_of(strict_tgi=strict_tgi),
    )
    chunk = chunks.chunk(index, CompletionDelta(text, None, 1, None), Usage(1, 1))
    template = ChunkTemplate(lambda text: chunks.text_chunk(index, text))
    assert template.fill(text) == orjson.dumps(chunk)
