"""OpenAI's responses on a real socket: shapes, events in order, tools, formats, errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from pydantic import TypeAdapter

from millrace_router.api.responses.protocol import ResponseEventJson, ResponseJson
from millrace_router.api.responses.request import ResponsesRequest
from millrace_router.errors import GenerationError, QueueExpired, RouterError
from millrace_router.request.request import GrammarKind, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import Edge, limits_with, play, serving, token_event
from millrace_testing.router.streams import (
    RESPONSES,
    events_of,
    response_events_in,
    response_of,
    without_ids,
)
from millrace_testing.text.texts import saying, tokenizer
from millrace_testing.text.thoughts import tagged

TEMPLATE = "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
WIDE = limits_with(max_input_tokens=100, max_total_tokens=400)
BYTES = tokenizer("byte_level")
ASKED: dict[str, Any] = {"model": "gpt", "input": "hello world"}
STREAM = {"stream": True}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
ARGUMENTS = '{"a": [1, "wörld"]}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
NULLS = dict.fromkeys(ResponsesRequest.model_fields)
EVENTS: TypeAdapter[Any] = TypeAdapter(list[ResponseEventJson])
RESPONSE_SHAPE: TypeAdapter[Any] = TypeAdapter(ResponseJson)


served = partial(serving, limits=WIDE, template=TEMPLATE)


def message(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": status, "role": "assistant", "content": [part]}


def called(arguments: str = ARGUMENTS, status: str = "completed") -> dict[str, Any]:
    return {"type": "function_call", "status": status, "name": "add", "arguments": arguments}


async def test_an_answer_has_the_form_of_openai() -> None:
    async with served(saying("Hello 好!")) as edge:
        status, answer, response = await edge.post(RESPONSES, ASKED | {"metadata": {"a": "b"}})
    assert status == 200
    RESPONSE_SHAPE.validate_python(answer, strict=True)
    assert without_ids(answer) == {
        "object": "response",
        "status": "completed",
        "completed_at": True,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": "gpt",
        "output": [message("Hello 好!")],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        # The fake edge's tokenizer counts words: user, hello, world, bot.
        "usage": {
            "input_tokens": 4,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": len(BYTES.encode("Hello 好!")) + 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 4 + len(BYTES.encode("Hello 好!")) + 1,
        },
        "user": None,
        "metadata": {"a": "b"},
    }
    assert response.headers["x-prompt-tokens"] == "4"


async def test_a_stream_has_the_same_response() -> None:
    async with served(saying("Hello 好!", "Hello 好!")) as edge:
        _, whole, _ = await edge.post(RESPONSES, ASKED)
        events = await events_of(edge, ASKED)
    EVENTS.validate_python(events, strict=True)
    names = [event["type"].removeprefix("response.") for event in events]
    num_deltas = names.count("output_text.delta")
    assert num_deltas > 1
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * num_deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert without_ids(response_of(events)) == without_ids(whole)


async def test_the_answer_repeats_the_request_s_fields() -> None:
    asked = {
        "instructions": "be brief",
        "max_output_tokens": 90,
        "temperature": 0.3,
        "top_p": 0.9,
        "tools": [TOOL, TOOL | {"name": "sub", "strict": True, "description": "less"}],
        "tool_choice": {"type": "function", "name": "add"},
        "parallel_tool_calls": False,
        "metadata": {"k": "v"},
        "user": "me",
        "safety_identifier": "s",
        "prompt_cache_key": "c",
    }
    async with served(saying("a"), tool_call_parser="hermes") as edge:
        _, answer, _ = await edge.post(RESPONSES, ASKED | asked)
    tools = answer.pop("tools")
    assert {key: answer[key] for key in asked if key != "tools"} == {
        key: value for key, value in asked.items() if key != "tools"
    }
    assert tools == [
        TOOL | {"description": None, "strict": False},
        TOOL | {"name": "sub", "description": "less", "strict": True},
    ]


ACCEPTED: dict[str, Any] = {
    "store": True,
    "truncation": "auto",
    "include": ["reasoning.encrypted_content", "file_search_call.results"],
    "service_tier": "flex",
    "background": False,
    "max_tool_calls": 3,
    "stream_options": {"include_obfuscation": False},
    "prompt_cache_retention": "24h",
    "moderation": {"odd": 1},
    "unheard_of": [1],
}


@pytest.mark.parametrize("name", ACCEPTED)
async def test_response_fields_without_effect_are_accepted(name: str) -> None:
    async with served(saying("a", "a")) as edge:
        _, usual, _ = await edge.post(RESPONSES, ASKED)
        answer = await edge.answer(RESPONSES, ASKED | {name: ACCEPTED[name]})
    assert without_ids(answer) == without_ids(usual)


async def test_null_is_taken_for_every_optional_field() -> None:
    async with served(saying("a", "a")) as edge:
        _, usual, _ = await edge.post(RESPONSES, ASKED)
        answer = await edge.answer(RESPONSES, NULLS | ASKED)
    assert without_ids(answer) == without_ids(usual)


async def test_usage_has_cached_tokens() -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.cached_tokens = 3
        play(stream, " x")

    async with served(script) as edge:
        _, answer, _ = await edge.post(RESPONSES, ASKED)
        streamed = response_of(await events_of(edge, ASKED))
    assert answer["usage"]["input_tokens"] == 4
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert streamed["usage"] == answer["usage"]


@pytest.mark.parametrize("is_strict", [False, True], ids=["usual", "strict_tgi"])
@pytest.mark.parametrize(
    ("text", "asked", "said", "status"),
    [
        ("one two", {}, "one two", "completed"),
        ("one two", {"max_output_tokens": 2}, None, "incomplete"),
        ("one two", {"stop": ["two", " tw"]}, "one", "completed"),
        ("", {}, "", "completed"),
    ],
    ids=["end", "length", "stop", "nothing"],
)
async def test_the_status_shows_how_the_response_ended(
    text: str, asked: dict[str, Any], said: str | None, status: str, is_strict: bool
) -> None:
    async with served(saying(text, text), strict_tgi=is_strict) as edge:
        _, answer, _ = await edge.post(RESPONSES, ASKED | asked)
        streamed = response_of(await events_of(edge, ASKED | asked))
    assert (answer["status"], answer["output"][0]["status"]) == (status, status)
    assert (answer["completed_at"] is None) == (status == "incomplete")
    reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert answer["incomplete_details"] == reason
    if said is not None:
        assert answer["output"][0]["content"][0]["text"] == said
    assert without_ids(streamed) == without_ids(answer)


@pytest.mark.parametrize(
    ("text", "asked", "output"),
    [
        (CALL, {}, [called()]),
        (f"I add.{CALL}\n{CALL}", {}, [message("I add."), called(), called()]),
        (f"{CALL} Done.", {}, [called(), message(" Done.")]),
        ("No.", {"tool_choice": "auto"}, [message("No.")]),
        (CALL, {"tool_choice": "none"}, [message(CALL)]),
    ],
    ids=["call", "text_and_calls", "call_and_text", "text", "none"],
)
async def test_calls_become_items(text: str, asked: dict[str, Any], output: list[Any]) -> None:
    asked = ASKED | {"tools": [TOOL]} | asked
    async with served(saying(text, text), tool_call_parser="hermes") as edge:
        _, answer, _ = await edge.post(RESPONSES, asked)
        events = await events_of(edge, asked)
    calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    assert len(set(calls)) == len(calls)
    assert without_ids(answer)["output"] == output
    EVENTS.validate_python(events, strict=True)
    assert without_ids(response_of(events)) == without_ids(answer)


@pytest.mark.parametrize("length", [None, len(BYTES.encode(CALL[:-20]))], ids=["broken", "cut"])
async def test_a_call_that_is_not_whole_is_text_and_never_complete(length: int | None) -> None:
    asked = ASKED | {"tools": [TOOL], "max_output_tokens": length}
    async with served(saying(CALL[:-20], CALL[:-20]), tool_call_parser="hermes") as edge:
        _, answer, _ = await edge.post(RESPONSES, asked)
        events = await events_of(edge, asked)
    status = "completed" if length is None else "incomplete"
    assert without_ids(answer)["output"] == [message(CALL[:-20], status)]
    EVENTS.validate_python(events, strict=True)
    (item,) = response_of(events)["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert not [
        event for event in events if event["type"] == "response.function_call_arguments.done"
    ]


LONG = limits_with(max_input_tokens=1000, max_total_tokens=2000, vocab_size=500)


async def test_a_picture_in_a_result_does_not_end_the_conversation() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    turns = [
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [picture]},
    ]
    async with served(saying("ok"), tokenizer=BYTES, limits=LONG) as edge:
        status, _, response = await edge.post(RESPONSES, ASKED | {"input": turns})
        (request,) = edge.batcher.requests
    assert status == 200
    assert response.headers["x-millrace-ignored"] == "input.output.input_image"
    prompt = BYTES.decode(request.input_ids, skip_special_tokens=False)
    assert "[image left out]" in prompt


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": {"a": 1}}])
async def test_what_a_client_kept_of_a_turn_does_not_end_the_conversation(
    arguments: dict[str, Any],
) -> None:
    turns = [
        {"role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c", "name": "add", **arguments},
        {"type": "function_call_output", "call_id": "c", "output": None},
        {"role": "user", "content": "hello"},
    ]
    async with served(saying("ok"), tokenizer=BYTES, limits=LONG) as edge:
        status, answer, _ = await edge.post(RESPONSES, ASKED | {"input": turns})
    assert status == 200, answer


async def test_a_strict_tool_is_a_grammar() -> None:
    script = saying(CALL, CALL)
    async with served(script, tool_call_parser="hermes") as edge:
        for strict in (False, True):
            await edge.post(RESPONSES, ASKED | {"tools": [TOOL | {"strict": strict}]})
    assert [request.grammar is not None for request in script.requests] == [False, True]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMATS: dict[str, tuple[Any, Any]] = {
    "schema": (
        {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True},
        {
            "type": "json_schema",
            "name": "n",
            "description": None,
            "schema": SCHEMA,
            "strict": True,
        },
    ),
    "object": ({"type": "json_object"}, {"type": "json_object", "value": None}),
    "regex": ({"type": "regex", "value": "a+"}, {"type": "regex", "value": "a+"}),
}


@pytest.mark.parametrize("name", FORMATS)
async def test_formats_are_grammars(name: str) -> None:
    given, told = FORMATS[name]
    script = saying("{}")
    async with served(script) as edge:
        answer = await edge.answer(RESPONSES, ASKED | {"text": {"format": given}})
    (request,) = script.requests
    assert request.grammar is not None
    kind = GrammarKind.REGEX if name == "regex" else GrammarKind.JSON_SCHEMA
    assert request.grammar.kind is kind
    assert answer["text"] == {"format": told}


async def test_log_probabilities_come_with_the_text() -> None:
    asked = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    text = "one two"
    script = saying(text, text)
    script.candidates = [(5, -0.1), (6, -0.2), (7, -0.3)]
    async with served(script) as edge:
        _, answer, _ = await edge.post(RESPONSES, asked)
        events = await events_of(edge, asked)
    logprobs = answer["output"][0]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs) == text
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs) == text.encode()
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    assert answer["top_logprobs"] == 2
    assert without_ids(response_of(events)) == without_ids(answer)


async def test_extensions_reach_the_request() -> None:
    script = saying("a")
    asked = {"seed": 7, "top_k": 3, "min_p": 0.25, "frequency_penalty": 0.5, "min_tokens": 1}
    async with served(script) as edge:
        await edge.answer(RESPONSES, ASKED | asked)
    (request,) = script.requests
    sampling = request.sampling
    assert (sampling.seed, sampling.top_k, sampling.min_p) == (7, 3, 0.25)
    assert (sampling.openai_frequency_penalty, request.min_new_tokens) == (0.5, 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "conversation": ({"conversation": {"id": "conv_1"}}, "conversation"),
    "prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "background": ({"background": True}, "background"),
    "foreign_item": ({"input": [{"type": "telepathy", "id": "w"}]}, "telepathy"),
    "unreadable_item": (
        {"input": [{"type": "compaction", "encrypted_content": "x"}]},
        "`compaction`, which is not supported",
    ),
    "image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input_image",
    ),
    "no_input": ({"input": []}, "input"),
    "no_role": ({"input": [{"type": "message", "content": "a"}]}, "role"),
    "no_tool_left": ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "required"),
    "nameless_tool": ({"tools": [{"type": "function"}]}, "name"),
    "unknown_choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}},
        "sub",
    ),
    "built_in_choice": ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
    "shape": ({"max_output_tokens": "many"}, "max_output_tokens"),
    "value": ({"temperature": -1.0}, "temperature"),
    "least": (
        {"max_output_tokens": 1, "min_tokens": 2},
        "`min_tokens` must be <= `max_output_tokens`",
    ),
    "candidates": ({"top_logprobs": 99}, "`top_logprobs` must be >= 0"),
    "format": ({"text": {"format": {"type": "yaml"}}}, "format"),
    "template": ({"input": "raise"}, "no such luck"),
}


STRICT = [(name, True) for name in ("background", "shape", "no_tool_left")]


@pytest.mark.parametrize(("name", "is_strict"), [*((name, False) for name in REFUSED), *STRICT])
async def test_mistakes_in_a_request_are_reported(name: str, is_strict: bool) -> None:
    asked, said = REFUSED[name]
    template = (
        "{% if 'raise' in messages[0].content %}{{ raise_exception('no such luck') }}{% endif %}x"
    )
    options = {"template": template, "tool_call_parser": "hermes", "strict_tgi": is_strict}
    async with served(saying("a"), **options) as edge:
        for body in (ASKED | asked, ASKED | asked | STREAM):
            status, answer, _ = await edge.post(RESPONSES, body)
            assert status == 422, answer
            assert said in answer["error"]["message"]
            assert answer["error"]["type"] == answer["error_type"]
    assert edge.batcher.requests == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GenerationError("out of luck"), "server_error"),
        (QueueExpired(retry_after_seconds=1.0), "rate_limit_exceeded"),
    ],
    ids=["generation", "overload"],
)
async def test_a_failure_in_mid_stream_ends_it_with_the_partial_response(
    error: RouterError, code: str
) -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.token(token_event(1, " x"))
        stream.fail(error)

    async with served(script) as edge:
        events = await events_of(edge, ASKED)
    EVENTS.validate_python(events, strict=True)
    *_, delta, told, failed = events
    assert delta["type"] == "response.output_text.delta"
    assert (told["type"], told["code"]) == ("error", error.error_type)
    assert told["message"] == str(error)
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["status"], response["usage"]) == ("failed", None)
    assert response["error"] == {"code": code, "message": str(error)}
    assert without_ids(response)["output"] == [message(" x", "incomplete")]


async def test_a_failure_after_nothing_but_silence_has_a_beginning() -> None:
    async with (
        served(None, keep_alive_seconds=0.02) as edge,
        edge.client.post(edge.url + RESPONSES, json=ASKED | STREAM) as response,
    ):
        assert (await response.content.readline()) == b":\n"
        edge.batcher.streams[0].fail(GenerationError("out of luck"))
        rest = (await response.content.read()).decode()
    text = rest[rest.index("event: ") :]
    names = [event["type"] for event in response_events_in(text)]
    assert names == ["response.created", "response.in_progress", "error", "response.failed"]


async def test_tokens_are_counted_however_many_there_are() -> None:
    async with served(saying("a")) as edge:
        _, answer, _ = await edge.post(RESPONSES, ASKED)
        _, same, _ = await edge.post(f"{RESPONSES}/input_tokens", ASKED)
        status, many, _ = await edge.post(f"{RESPONSES}/input_tokens", {"input": "hello " * 1000})
    assert same["input_tokens"] == answer["usage"]["input_tokens"]
    assert (status, many) == (200, {"object": "response.input_tokens", "input_tokens": 1002})


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_no_response_is_stored(method: str) -> None:
    async with served(saying("a")) as edge:
        _, answer, _ = await edge.post(RESPONSES, ASKED | {"store": True})
        url = f"{edge.url}{RESPONSES}/{answer['id']}"
        async with edge.client.request(method, url) as response:
            assert response.status == 404
            told = await response.json()
    assert answer["store"] is False
    assert told["error"]["type"] == "not_found"
    assert answer["id"] in told["error"]["message"]


THINKING_TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }} {% if turn.reasoning_content %}"
    "<think>{{ turn.reasoning_content }}</think>{% endif %}{{ turn.content }} {% endfor %}bot "
    "{{ reasoning_effort | default('') }}"
)
LIMITS = limits_with(max_input_tokens=600, max_total_tokens=1500, vocab_size=500)
TOKENS = tagged()
THINKS = "<think>\nWörld or not?\n</think>\n\n"
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THINKING: dict[str, Any] = {"input": "hello", "tools": [TOOL]}


def serving_thoughts(*texts: str) -> Any:
    return serving(
        saying(*texts, using=TOKENS),
        limits=LIMITS,
        template=THINKING_TEMPLATE,
        tokenizer=TOKENS,
        tool_call_parser="hermes",
    )


async def whole(edge: Edge, **body: Any) -> dict[str, Any]:
    answer = await edge.answer(RESPONSES, THINKING | body)
    TypeAdapter(ResponseJson).validate_python(answer, strict=True)
    result: dict[str, Any] = answer
    return result


@pytest.mark.parametrize(
    ("rest", "kinds"),
    [
        ("Yes.", ["reasoning", "message"]),
        (HERMES_CALL, ["reasoning", "function_call"]),
        (f"Yes.{HERMES_CALL}", ["reasoning", "message", "function_call"]),
        ("", ["reasoning"]),
    ],
)
async def test_a_thought_is_the_first_item(rest: str, kinds: list[str]) -> None:
    async with serving_thoughts(THINKS + rest, THINKS + rest) as edge:
        answer = await whole(edge)
        events = await events_of(edge, THINKING)
    TypeAdapter(list[ResponseEventJson]).validate_python(events, strict=True)
    for told in (answer, response_of(events)):
        assert [item["type"] for item in told["output"]] == kinds
        thought = told["output"][0]
        assert thought["id"].startswith("rs_")
        assert thought["summary"] == [{"type": "summary_text", "text": "Wörld or not?"}]
        assert thought["status"] == "completed"
        spent = len(TOKENS.encode(THINKS.strip()))
        assert told["usage"]["output_tokens_details"] == {"reasoning_tokens": spent}


async def test_a_thought_that_is_cut_is_incomplete() -> None:
    async with serving_thoughts(THINKS) as edge:
        answer = await whole(edge, max_output_tokens=6)
    (thought,) = answer["output"]
    assert (answer["status"], thought["status"]) == ("incomplete", "incomplete")


async def test_the_effort_reaches_the_template_and_the_answer() -> None:
    asked = {"effort": "low", "summary": "auto"}
    async with serving_thoughts("Yes.") as edge:
        answer = await whole(edge, reasoning=asked)
        prompt = TOKENS.decode(edge.batcher.requests[0].input_ids, skip_special_tokens=False)
    assert prompt.endswith("bot low")
    assert answer["reasoning"] == asked


async def test_items_are_accepted_as_input() -> None:
    async with serving_thoughts(THINKS + "Yes.", "Yes.") as edge:
        answer = await whole(edge)
        await whole(edge, input=[*answer["output"], {"role": "user", "content": "and?"}])
        prompt = TOKENS.decode(edge.batcher.requests[1].input_ids, skip_special_tokens=False)
    assert "assistant <think>Wörld or not?</think>Yes. user and?" in prompt


async def test_the_events_of_a_thought_are_complete() -> None:
    async with serving_thoughts(THINKS) as edge:
        events = await events_of(edge, THINKING)
    names = [event["type"].removeprefix("response.") for event in events]
    num_deltas = names.count("reasoning_summary_text.delta")
    assert num_deltas > 1
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        *["reasoning_summary_text.delta"] * num_deltas,
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "completed",
    ]


async def test_a_budget_bounds_the_thought() -> None:
    async with serving_thoughts("Yes.") as edge:
        await whole(edge, thinking_token_budget=7)
        grammar = edge.batcher.requests[0].grammar
    assert grammar is not None
    assert "{0,7}" in grammar.source
