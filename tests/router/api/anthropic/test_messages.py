"""Anthropic's messages on a real socket: shapes, events in order, stop reasons, tools, errors, the key."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_router.errors import GenerationError, RouterError, ShardsGone
from millrace_router.request.request import ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_testing.router.edge import Edge, fail, limits_with, play, serving, token_event
from millrace_testing.router.idempotent import KEY
from millrace_testing.router.messages import events_in, message_of
from millrace_testing.text.texts import Generations, Plan, tokenizer

TEMPLATE = "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
WIDE = limits_with(max_input_tokens=100, max_total_tokens=400)
BYTES = tokenizer("byte_level")
END = 0
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hello world"}
ASKED: dict[str, Any] = {"model": "claude", "max_tokens": 200, "messages": [USER]}
STREAM = {"stream": True}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "wörld"]}}\n</tool_call>'


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text))


def generations(*plans: Plan) -> Generations:
    return Generations(*plans, tokenizer=BYTES)


def says(*texts: str) -> Generations:
    """A script that says each text to one request after the other, and ends."""
    return generations(*([*ids(text), END] for text in texts))


def served(script: Any, **options: Any) -> Any:
    return serving(script, **{"limits": WIDE, "template": TEMPLATE, **options})


async def stream_of(edge: Edge, body: dict[str, Any], **headers: str) -> list[tuple[str, Any]]:
    async with edge.client.post(
        edge.url + MESSAGES, json=body | STREAM, headers=headers
    ) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        return events_in(await response.text())


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message but for what differs from call to call, whose form is checked."""
    assert message.pop("id").startswith("msg_")
    for block in message["content"]:
        assert block.pop("id", "toolu_").startswith("toolu_")
    return message


async def test_an_answer_has_the_form_of_anthropic() -> None:
    async with served(says("Hello 好!")) as edge:
        status, answer, response = await edge.post(MESSAGES, ASKED)
    assert status == 200
    assert list(answer) == [
        "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage",
    ]  # fmt: skip
    assert without_ids(answer) == {
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [{"type": "text", "text": "Hello 好!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        # The fake edge's tokenizer counts words: user, hello, world, bot.
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": len(ids("Hello 好!")) + 1,
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.headers["x-prompt-tokens"] == "4"


async def test_ids_are_unique_and_without_a_name_the_model_has_its_own() -> None:
    async with served(says("a", "b")) as edge:
        answers = [(await edge.post(MESSAGES, ASKED | {"model": None}))[1] for _ in range(2)]
    assert answers[0]["model"] == "org/tiny"
    assert answers[0]["id"] != answers[1]["id"]


async def test_a_stream_has_the_same_message() -> None:
    async with served(says("Hello 好!", "Hello 好!")) as edge:
        _, whole, _ = await edge.post(MESSAGES, ASKED)
        events = await stream_of(edge, ASKED)
    names = [name for name, _ in events]
    num_deltas = names.count("content_block_delta")
    assert num_deltas > 1
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0][1]["message"]
    assert (start["content"], start["usage"]["output_tokens"]) == ([], 0)
    assert without_ids(message_of(events)) == without_ids(whole)


async def test_tokens_found_computed_are_counted_apart() -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.cached_tokens = 3
        play(stream, " x")

    async with served(script) as edge:
        _, answer, _ = await edge.post(MESSAGES, ASKED)
        events = await stream_of(edge, ASKED)
    assert answer["usage"]["input_tokens"] == 1
    assert answer["usage"]["cache_read_input_tokens"] == 3
    for usage in (events[0][1]["message"]["usage"], events[-2][1]["usage"]):
        assert usage == answer["usage"] | {"output_tokens": usage["output_tokens"]}


@pytest.mark.parametrize("is_strict", [False, True], ids=["usual", "strict_tgi"])
@pytest.mark.parametrize(
    ("text", "asked", "said", "end"),
    [
        ("one two", {}, "one two", ("end_turn", None)),
        ("one two", {"max_tokens": 3}, None, ("max_tokens", None)),
        ("one two", {"stop_sequences": ["two", " tw"]}, "one", ("stop_sequence", " tw")),
        ("one two", {"stop_sequences": ["one"]}, "", ("stop_sequence", "one")),
    ],
    ids=["end", "length", "stop", "stop_at_once"],
)
async def test_the_stop_reason_shows_how_the_message_ended(
    text: str, asked: dict[str, Any], said: str | None, end: tuple[str, str | None], is_strict: bool
) -> None:
    async with served(says(text, text), strict_tgi=is_strict) as edge:
        _, answer, _ = await edge.post(MESSAGES, ASKED | asked)
        streamed = message_of(await stream_of(edge, ASKED | asked))
    assert (answer["stop_reason"], answer["stop_sequence"]) == end
    if said is not None:
        assert answer["content"] == ([{"type": "text", "text": said}] if said else [])
    assert without_ids(streamed) == without_ids(answer)


@pytest.mark.parametrize(
    ("text", "asked", "content", "stop_reason"),
    [
        (
            CALL,
            {},
            [{"type": "tool_use", "name": "add", "input": {"a": [1, "wörld"]}}],
            "tool_use",
        ),
        (
            f"I add.{CALL}\n{CALL}",
            {},
            [
                {"type": "text", "text": "I add."},
                *[{"type": "tool_use", "name": "add", "input": {"a": [1, "wörld"]}}] * 2,
            ],
            "tool_use",
        ),
        (
            f"{CALL}Done.",
            {},
            [
                {"type": "tool_use", "name": "add", "input": {"a": [1, "wörld"]}},
                {"type": "text", "text": "Done."},
            ],
            "tool_use",
        ),
        (
            f"{CALL}stop",
            {"stop_sequences": ["stop"]},
            [{"type": "tool_use", "name": "add", "input": {"a": [1, "wörld"]}}],
            "tool_use",
        ),
        ("No.", {"tool_choice": {"type": "auto"}}, [{"type": "text", "text": "No."}], "end_turn"),
        (CALL, {"tool_choice": {"type": "none"}}, [{"type": "text", "text": CALL}], "end_turn"),
    ],
    ids=["call", "text_and_calls", "call_and_text", "call_and_stop", "text", "none"],
)
async def test_calls_become_tool_use_blocks(
    text: str, asked: dict[str, Any], content: list[Any], stop_reason: str
) -> None:
    asked = ASKED | {"tools": [TOOL]} | asked
    async with served(says(text, text), tool_call_parser="hermes") as edge:
        _, answer, _ = await edge.post(MESSAGES, asked)
        streamed = message_of(await stream_of(edge, asked))
    names = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    assert len(set(names)) == len(names)
    assert without_ids(answer)["content"] == content
    assert (answer["stop_reason"], answer["stop_sequence"]) == (stop_reason, None)
    assert without_ids(streamed) == answer


async def test_a_call_that_is_cut_short_has_the_arguments_that_are_there() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "wo'
    num_tokens = len(ids(text))
    asked = ASKED | {"tools": [TOOL], "max_tokens": num_tokens}
    async with served(says(text), tool_call_parser="hermes") as edge:
        _, answer, _ = await edge.post(MESSAGES, asked)
    assert answer["stop_reason"] == "max_tokens"
    (block,) = answer["content"]
    assert block["input"] == {"a": 12, "b": "wo"}


async def test_what_the_assistant_began_is_gone_on_with() -> None:
    script = says(" you")
    turns = [USER, {"role": "assistant", "content": "And to"}]
    async with served(script) as edge:
        _, answer, _ = await edge.post(MESSAGES, ASKED | {"messages": turns})
        _, count, _ = await edge.post(COUNT, {"messages": turns})
    assert answer["content"] == [{"type": "text", "text": " you"}]
    # "user hello world assistant And to", of which the fake edge's tokenizer counts the words.
    assert len(script.requests[0].input_ids) == 6
    assert count == {"input_tokens": 6}


async def test_tokens_are_counted_however_many_there_are() -> None:
    turn = {"role": "user", "content": "hello " * 1000}
    async with served(None) as edge:
        status, answer, _ = await edge.post(COUNT, {"messages": [turn]})
    assert (status, answer) == (200, {"input_tokens": 1002})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"max_tokens": None}, "max_tokens"),
    "value": ({"temperature": -1.0}, "temperature"),
    "length": ({"max_tokens": 1000}, "`max_tokens` must be <= 400"),
    "stops": ({"stop_sequences": list("abcde")}, "`stop_sequences` supports up to 4"),
    "tool": ({"tool_choice": {"type": "tool", "name": "sub"}, "tools": [TOOL]}, "sub"),
    "template": ({"messages": [USER | {"content": "raise"}]}, "no such luck"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_mistakes_in_a_request_are_reported(name: str) -> None:
    asked, message = REFUSED[name]
    template = (
        "{% if 'raise' in messages[0].content %}{{ raise_exception('no such luck') }}{% endif %}x"
    )
    async with served(says("a"), template=template) as edge:
        for body in (ASKED | asked, ASKED | asked | STREAM):
            status, answer, response = await edge.post(MESSAGES, body)
            assert status == 400
            assert answer["type"] == "error"
            assert answer["error"]["type"] == "invalid_request_error"
            assert message in answer["error"]["message"]
            assert answer["request_id"] == response.headers["request-id"]


def fails(error: RouterError) -> Any:
    return lambda _, stream: stream.fail(error)


@pytest.mark.parametrize(
    ("options", "status", "kind", "retry"),
    [
        ({"script": fail}, 500, "api_error", "false"),
        ({"script": fails(ShardsGone("lost"))}, 503, "overloaded_error", None),
        ({"limits": limits_with(max_concurrent_requests=0)}, 429, "rate_limit_error", None),
        ({"payload_limit": 10}, 413, "request_too_large", None),
    ],
    ids=["generation", "shards", "overload", "size"],
)
async def test_faults_of_the_server_are_reported(
    options: dict[str, Any], status: int, kind: str, retry: str | None
) -> None:
    async with served(**{"script": None} | options) as edge:
        for body in (ASKED, ASKED | STREAM):
            given, answer, response = await edge.post(MESSAGES, body)
            assert (given, answer["error"]["type"]) == (status, kind)
            assert response.headers.get("x-should-retry") == retry
            assert ("retry-after" in response.headers) == (status == 429)


async def test_a_failure_in_mid_stream_is_the_last_event() -> None:
    def script(_: ValidRequest, stream: TokenStream) -> None:
        stream.token(token_event(1, " x"))
        stream.fail(GenerationError("out of luck"))

    async with served(script) as edge:
        *_, (delta, _), (name, data) = await stream_of(edge, ASKED, **{"x-request-id": "r-1"})
    assert (delta, name) == ("content_block_delta", "error")
    assert data["error"]["type"] == "api_error"
    assert "out of luck" in data["error"]["message"]
    assert data["request_id"] == "r-1"


async def test_a_stream_is_resumed_after_any_event() -> None:
    async with served(says("Hello you"), resume_grace=60.0) as edge:
        _, whole, _ = await edge.post(MESSAGES, ASKED | STREAM, headers=KEY)
        blocks = whole.removesuffix("\n\n").split("\n\n")
        numbered = [block for block in blocks if block.startswith("id: ")]
        assert len(numbered) > 3
        for index in range(1, len(numbered) + 1):
            known = {"last-event-id": str(index)}
            _, rest, _ = await edge.post(MESSAGES, ASKED | STREAM, headers=KEY | known)
            assert rest == "".join(block + "\n\n" for block in blocks[index:])
    assert len(edge.batcher.requests) == 1


@pytest.mark.parametrize("path", [MESSAGES, COUNT], ids=["messages", "count_tokens"])
async def test_the_key_comes_in_either_header(path: str) -> None:
    async with served(says("a", "a"), api_key="secret") as edge:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await edge.post(path, ASKED, headers=headers))[0] == 200
        for headers in ({}, {"x-api-key": "wrong"}):
            status, answer, response = await edge.post(path, ASKED, headers=headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert answer["request_id"] == response.headers["request-id"]


async def test_other_routes_of_anthropic_s_are_not_found() -> None:
    async with served(None) as edge:
        status, answer, _ = await edge.post("/v1/messages/batches", ASKED)
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        async with edge.client.get(edge.url + MESSAGES) as response:
            assert (response.status, response.headers["allow"]) == (405, "POST")
            assert (await response.json())["error"]["type"] == "invalid_request_error"
