"""Anthropic's messages on a real socket: shapes, events in order, stop reasons, tools, errors, the key."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from millrace_router.api.anthropic.request import CountTokensRequest, MessagesRequest
from millrace_router.api.anthropic.to_chat import NAMES, chat_of
from millrace_router.api.chat.chat import Chat
from millrace_router.errors import BodyShapeError, RouterError, ShardsGone, ValidationError
from millrace_router.request.generation_request import GenerationRequest
from millrace_router.request.grammar import RawGrammar
from millrace_router.request.limits import MILLRACE
from millrace_router.request.request import GrammarKind, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.server.bodies import to_model
from millrace_router.tool_calls.tool import Tool, ToolChoice
from millrace_testing.router.edge import Edge, break_off, fail, limits_with, play, plays, serving
from millrace_testing.router.streams import message_events_in, message_of
from millrace_testing.text.texts import saying, tokenizer

TEMPLATE = "{% for turn in messages %}{{ turn.role }} {{ turn.content }} {% endfor %}bot"
WIDE = limits_with(max_input_tokens=100, max_total_tokens=400)
BYTES = tokenizer("byte_level")
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hello world"}
ASKED: dict[str, Any] = {"model": "claude", "max_tokens": 200, "messages": [USER]}
LONG = {"role": "user", "content": "hello " * 301}
STREAM = {"stream": True}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
LARGEST = sys.float_info.max
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "wörld"]}}\n</tool_call>'


served = partial(serving, limits=WIDE, template=TEMPLATE)


async def stream_of(edge: Edge, body: dict[str, Any], **headers: str) -> list[tuple[str, Any]]:
    return message_events_in(await edge.stream(MESSAGES, body, **headers))


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message but for what differs from call to call, whose form is checked."""
    assert message.pop("id").startswith("msg_")
    for block in message["content"]:
        assert block.pop("id", "toolu_").startswith("toolu_")
    return message


async def test_an_answer_has_the_form_of_anthropic() -> None:
    async with served(saying("Hello 好!")) as edge:
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
            "output_tokens": len(BYTES.encode("Hello 好!")) + 1,
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.headers["x-prompt-tokens"] == "4"


async def test_ids_are_unique_and_without_a_name_the_model_has_its_own() -> None:
    async with served(saying("a", "b")) as edge:
        answers = [(await edge.post(MESSAGES, ASKED | {"model": None}))[1] for _ in range(2)]
    assert answers[0]["model"] == "org/tiny"
    assert answers[0]["id"] != answers[1]["id"]


async def test_a_stream_has_the_same_message() -> None:
    async with served(saying("Hello 好!", "Hello 好!")) as edge:
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


async def test_cached_tokens_are_counted_separately() -> None:
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
    async with served(saying(text, text), strict_tgi=is_strict) as edge:
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
    async with served(saying(text, text), tool_call_parser="hermes") as edge:
        _, answer, _ = await edge.post(MESSAGES, asked)
        streamed = message_of(await stream_of(edge, asked))
    names = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    assert len(set(names)) == len(names)
    assert without_ids(answer)["content"] == content
    assert (answer["stop_reason"], answer["stop_sequence"]) == (stop_reason, None)
    assert without_ids(streamed) == answer


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [('{"a": 12, "b": "wo', "max_tokens"), ('{"a": "rm -rf /tmp", "b": oops}', "end_turn")],
    ids=["cut", "broken"],
)
async def test_a_call_that_is_not_whole_is_text_and_never_a_use_of_a_tool(
    arguments: str, reason: str
) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}'
    asked = ASKED | {"tools": [TOOL]}
    if reason == "max_tokens":
        asked |= {"max_tokens": len(BYTES.encode(text))}
    async with served(saying(text, text), tool_call_parser="hermes") as edge:
        _, answer, _ = await edge.post(MESSAGES, asked)
        events = dict(await stream_of(edge, asked | STREAM))
    assert answer["content"] == [{"type": "text", "text": text}]
    assert answer["stop_reason"] == events["message_delta"]["delta"]["stop_reason"] == reason


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("9" * 30, [1e30]),
        ("1e999, -1e999, 2, 0.5", [LARGEST, -LARGEST, 2, 0.5]),
        ("-1" + "0" * 5000, [-LARGEST]),
    ],
    ids=["an integer", "floats", "a long integer"],
)
async def test_numbers_of_any_length_are_taken(written: str, read: list[float]) -> None:
    text = CALL.replace("[1,", f"[{written},")
    limits = limits_with(max_input_tokens=100, max_total_tokens=9000)
    async with served(saying(text), tool_call_parser="hermes", limits=limits) as edge:
        body = ASKED | {"tools": [TOOL], "max_tokens": 8000}
        status, answer, _ = await edge.post(MESSAGES, body)
    assert status == 200
    assert answer["content"][0]["input"] == {"a": [*read, "wörld"]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
PDF = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
}


ROOMY = limits_with(max_input_tokens=1000, max_total_tokens=2000, vocab_size=500)


async def test_a_picture_in_a_result_does_not_end_the_conversation() -> None:
    turns = [
        USER,
        {"role": "assistant", "content": [CALL_BLOCK]},
        {"role": "user", "content": [RESULT | {"content": [text("seen"), IMAGE, PDF]}]},
    ]
    async with served(saying("ok"), tokenizer=BYTES, limits=ROOMY) as edge:
        status, _, response = await edge.post(MESSAGES, ASKED | {"messages": turns})
        (request,) = edge.batcher.requests
    assert status == 200
    assert response.headers["x-millrace-ignored"] == "messages.image, messages.document"
    prompt = BYTES.decode(request.input_ids, skip_special_tokens=False)
    assert "tool seen\n[image left out]\n[document left out]" in prompt


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", IMAGE),
        ("user", PDF),
        ("user", {"type": "container_upload", "file_id": "f"}),
        ("user", {"type": "not_yet_known_tool_result"}),
        ("assistant", {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": {}}),
        ("assistant", {"type": "mcp_tool_use", "id": "m", "name": "f", "input": {}}),
        ("assistant", {"type": "mcp_tool_result", "tool_use_id": "m", "content": []}),
        ("assistant", {"type": "not_yet_known", "data": [1]}),
        ("assistant", {"type": "redacted_thinking", "data": "x"}),
        ("assistant", {"type": "compaction", "content": None}),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else value,
)
async def test_no_block_of_an_earlier_turn_ends_the_conversation(
    role: str, block: dict[str, Any]
) -> None:
    turns = [USER, {"role": role, "content": [text("so"), block]}, *[USER] * (role == "assistant")]
    async with served(saying("ok"), tokenizer=BYTES, limits=ROOMY) as edge:
        for path in (MESSAGES, COUNT):
            body = ASKED | {"messages": turns}
            status, answer, response = await edge.post(path, body)
            assert status == 200, answer
            assert response.headers["x-millrace-ignored"].endswith(f"messages.{block['type']}")
        (request,) = edge.batcher.requests
    prompt = BYTES.decode(request.input_ids, skip_special_tokens=False)
    is_silent = block["type"] in {"mcp_tool_use", "redacted_thinking", "compaction"}
    assert (f"so\n[{block['type']} left out]" in prompt) is not is_silent


@pytest.mark.parametrize("block", [IMAGE, PDF], ids=["image", "document"])
async def test_a_last_turn_without_a_text_is_refused(block: dict[str, Any]) -> None:
    async with served(saying("ok"), tokenizer=BYTES, limits=ROOMY) as edge:
        for path in (MESSAGES, COUNT):
            body = ASKED | {"messages": [USER, {"role": "user", "content": [block]}]}
            status, answer, _ = await edge.post(path, body)
            assert status == 400
            assert (
                f"has only '{block['type']}' (`messages.1.content.0`)" in answer["error"]["message"]
            )
        body = ASKED | {"messages": [{"role": "user", "content": [block]}, USER]}
        assert (await edge.post(MESSAGES, body))[0] == 200


@pytest.mark.parametrize("kept", [{}, {"input": None}, {"input": ""}, {"input": '{"a": "b'}])
async def test_a_call_without_whole_arguments_does_not_end_the_conversation(
    kept: dict[str, Any],
) -> None:
    call = {key: value for key, value in CALL_BLOCK.items() if key != "input"} | kept
    turns = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [RESULT | {"content": "seen"}]},
    ]
    async with served(saying("ok"), tokenizer=BYTES, limits=ROOMY) as edge:
        status, answer, _ = await edge.post(MESSAGES, ASKED | {"messages": turns})
    assert status == 200, answer


async def test_a_message_that_the_assistant_began_is_continued() -> None:
    script = saying(" you")
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
    async with served(saying("a"), template=template) as edge:
        for body in (ASKED | asked, ASKED | asked | STREAM):
            status, answer, response = await edge.post(MESSAGES, body)
            assert status == 400
            assert answer["type"] == "error"
            assert answer["error"]["type"] == "invalid_request_error"
            assert message in answer["error"]["message"]
            assert answer["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize("body", [ASKED, ASKED | STREAM], ids=["whole", "stream"])
async def test_too_many_tokens_are_an_upper_bound_unless_that_is_switched_off(
    body: dict[str, Any],
) -> None:
    body = body | {"max_tokens": 32_000}
    async with served(plays(" a")) as edge:
        status, _, response = await edge.post(MESSAGES, body)
        (request,) = edge.batcher.requests
    assert (status, request.max_new_tokens) == (200, 400 - len(request.input_ids))
    assert response.headers["x-millrace-max-tokens"] == str(request.max_new_tokens)
    async with served(plays(" a"), strict_max_tokens=True) as edge:
        status, answer, _ = await edge.post(MESSAGES, body)
    assert status == 400
    assert answer["error"]["message"] == (
        "input length and `max_tokens` exceed context limit: 4 + 32000 > 400, decrease input length"
        " or `max_tokens` and try again"
    )


async def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words() -> None:
    async with served(plays(" a")) as edge:
        for body in (ASKED | {"messages": [LONG]}, ASKED | {"messages": [LONG]} | STREAM):
            status, answer, _ = await edge.post(MESSAGES, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            # The turn's role and "bot" are tokens, too.
            assert answer["error"]["message"] == "prompt is too long: 303 tokens > 100 maximum"


async def test_the_block_for_anthropics_servers_is_left_out() -> None:
    rules = {"type": "text", "text": "rules"}
    bodies = [
        {"system": [{"type": "text", "text": f"x-anthropic-billing-header: cch={one}"}, rules]}
        for one in "ab"
    ]
    async with served(plays(" a")) as edge:
        headers = [(await edge.post(MESSAGES, ASKED | body))[2].headers for body in bodies]
        _, count, _ = await edge.post(COUNT, {"messages": [USER], **bodies[0]})
        await edge.post(MESSAGES, ASKED | {"system": [rules]})
        prompts = {request.input_ids for request in edge.batcher.requests}
    assert len(prompts) == 1
    assert count == {"input_tokens": len(prompts.pop())}
    assert [one["x-millrace-ignored"] for one in headers] == ["system.billing_header"] * 2


@pytest.mark.parametrize(
    "refused", ["turn.role == 'system' and not loop.first", "turn.role == 'system'"]
)
@pytest.mark.parametrize("path", [MESSAGES, COUNT], ids=["messages", "count_tokens"])
async def test_system_turns_that_the_template_refuses_are_folded(path: str, refused: str) -> None:
    template = (
        f"{{% for turn in messages %}}{{% if {refused} %}}"
        "{{ raise_exception('no') }}{% endif %}{{ turn.content }} {% endfor %}bot"
    )
    turns = [USER, {"role": "system", "content": "b"}, USER]
    async with served(plays(" a"), template=template) as edge:
        status, _, _ = await edge.post(path, ASKED | {"system": "a", "messages": turns})
    assert status == 200


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
    async with served(break_off) as edge:
        *_, (delta, _), (name, data) = await stream_of(edge, ASKED, **{"x-request-id": "r-1"})
    assert (delta, name) == ("content_block_delta", "error")
    assert data["error"]["type"] == "api_error"
    assert "out of luck" in data["error"]["message"]
    assert data["request_id"] == "r-1"


@pytest.mark.parametrize("path", [MESSAGES, COUNT], ids=["messages", "count_tokens"])
async def test_the_key_comes_in_either_header(path: str) -> None:
    async with served(saying("a", "a"), api_key="secret") as edge:
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


USER_MESSAGE = {"role": "user", "content": "hello"}
CALL_BLOCK = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
CALLED = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a":1}'},
}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
TOOL_OF_CHAT = {"name": "add", "description": "Adds", "input_schema": {"type": "object"}}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def translated(body: dict[str, Any]) -> Chat:
    """The chat that a body becomes."""
    asked = to_model({"max_tokens": 5, "messages": [USER_MESSAGE]} | body, MessagesRequest)
    return chat_of(asked, MILLRACE)


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a string": ([USER_MESSAGE], [USER_MESSAGE]),
    "blocks of text, a line each": (
        [{"role": "user", "content": [text("a"), text("b")]}],
        [{"role": "user", "content": "a\nb"}],
    ),
    "turns of one role are one": (
        [USER_MESSAGE, {"role": "user", "content": [text("again")]}],
        [{"role": "user", "content": "hello\nagain"}],
    ),
    "passages and documents are text": (
        [
            {
                "role": "user",
                "content": [
                    {
                        "type": "search_result",
                        "source": "http://x",
                        "title": "t",
                        "content": [text("a"), text("b")],
                    },
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": "c"},
                        "title": "d",
                        "context": "e",
                    },
                    {"type": "document", "source": {"type": "content", "content": [text("f")]}},
                ],
            }
        ],
        [{"role": "user", "content": "t\nhttp://x\na\nb\nd\ne\nc\nf"}],
    ),
    "what Anthropic's tools left is left out": (
        [
            USER_MESSAGE,
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    text("a"),
                ],
            },
            USER_MESSAGE,
        ],
        [
            USER_MESSAGE,
            {"role": "assistant", "content": "[web_search_tool_result left out]\na"},
            USER_MESSAGE,
        ],
    ),
    "a summary takes the place of what precedes it": (
        [
            USER_MESSAGE,
            {
                "role": "assistant",
                "content": [{"type": "compaction", "content": "first"}, text("a")],
            },
            USER_MESSAGE,
            {
                "role": "assistant",
                "content": [
                    text("b"),
                    {"type": "compaction", "content": "they greeted"},
                    CALL_BLOCK,
                ],
            },
            {"role": "user", "content": [RESULT | {"content": "2"}]},
        ],
        [
            {"role": "user", "content": "they greeted"},
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
        ],
    ),
    "a summary alone at the end of a turn": (
        [
            USER_MESSAGE,
            {"role": "assistant", "content": [{"type": "compaction", "content": "they greeted"}]},
            USER_MESSAGE,
        ],
        [{"role": "user", "content": "they greeted\nhello"}],
    ),
    "a summary that failed": (
        [
            USER_MESSAGE,
            {"role": "assistant", "content": [{"type": "compaction", "content": None}, text("a")]},
        ],
        [USER_MESSAGE, {"role": "assistant", "content": "a"}],
    ),
    "nulls in place of texts": (
        [
            {"role": "user", "content": None},
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": None}, {"type": "text", "text": None}],
            },
            USER_MESSAGE,
        ],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, USER_MESSAGE],
    ),
    "no blocks": ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    "a system turn in between": (
        [USER_MESSAGE, {"role": "system", "content": "be brief"}, USER_MESSAGE],
        [USER_MESSAGE, {"role": "system", "content": "be brief"}, USER_MESSAGE],
    ),
    "thoughts are given back": (
        [
            USER_MESSAGE,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("hi"),
                ],
            },
        ],
        [USER_MESSAGE, {"role": "assistant", "content": "hi", "reasoning_content": "hm"}],
    ),
    "a call and its result": (
        [
            USER_MESSAGE,
            {"role": "assistant", "content": [text("I add."), CALL_BLOCK]},
            {"role": "user", "content": [RESULT | {"content": "2"}]},
        ],
        [
            USER_MESSAGE,
            {"role": "assistant", "content": "I add.", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"},
        ],
    ),
    "a call without text is a message without content": (
        [
            USER_MESSAGE,
            {"role": "assistant", "content": [CALL_BLOCK]},
            {"role": "user", "content": [RESULT | {"content": [text("2"), text("3")]}]},
        ],
        [
            USER_MESSAGE,
            {"role": "assistant", "content": None, "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2\n3"},
        ],
    ),
    "text around results stays where it is": (
        [
            {
                "role": "user",
                "content": [
                    text("before"),
                    RESULT,
                    RESULT | {"tool_use_id": "toolu_2", "content": None},
                    text("after"),
                ],
            }
        ],
        [
            {"role": "user", "content": "before"},
            {"role": "tool", "tool_call_id": "1", "content": ""},
            {"role": "tool", "tool_call_id": "2", "content": ""},
            {"role": "user", "content": "after"},
        ],
    ),
    "results of calls that failed": (
        [
            {
                "role": "user",
                "content": [
                    RESULT | {"content": "no such file", "is_error": True},
                    RESULT | {"is_error": True},
                    RESULT | {"content": "fine", "is_error": False},
                ],
            }
        ],
        [
            {"role": "tool", "tool_call_id": "1", "content": said}
            for said in ("Error: no such file", "Error", "fine")
        ],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_turns_are_translated(name: str) -> None:
    turns, expected = CONVERSATIONS[name]
    assert translated({"messages": turns}).messages == expected


@pytest.mark.parametrize("system", ["be kind", [text("be"), text("kind")]], ids=["text", "blocks"])
def test_the_system_prompt_comes_first(system: object) -> None:
    first, second = translated({"system": system}).messages
    assert first["role"] == "system"
    assert first["content"].split() == ["be", "kind"]
    assert second == USER_MESSAGE


def test_parameters_are_translated() -> None:
    asked = {
        "model": "claude",
        "stop_sequences": ["x"],
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
        "service_tier": "auto",
    }
    assert translated(asked) == Chat(
        request=GenerationRequest(
            max_new_tokens=5,
            stop=("x",),
            do_sample=True,
            temperature=0.5,
            top_p=0.75,
            top_k=5,
            names=NAMES,
        ),
        messages=[USER_MESSAGE],
        template_variables={"enable_thinking": False, "thinking": False},
    )


def test_a_null_is_as_good_as_nothing() -> None:
    optional = set(MessagesRequest.model_fields) - {"messages", "max_tokens"}
    assert translated(dict.fromkeys(optional)) == translated({})


def test_a_top_p_of_one_does_not_restrict() -> None:
    assert translated({"top_p": 1}).request.top_p is None


def test_a_schema_becomes_the_grammar_of_the_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = {
        "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    }
    assert translated(asked).request.grammar == RawGrammar(GrammarKind.JSON_SCHEMA, schema)


def test_tools_become_tools_of_chat() -> None:
    tools = [
        TOOL_OF_CHAT | {"strict": True, "cache_control": {"type": "ephemeral"}},
        TOOL_OF_CHAT | {"type": "custom"},
    ]
    first, second = translated({"tools": tools}).tools
    assert first == Tool("add", "Adds", {"type": "object"}, strict=True)
    assert second == replace(first, strict=False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, "named"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else value,
)
def test_tool_choices_are_translated(choice: dict[str, Any], expected: Any) -> None:
    for parallel in (True, False):
        asked = choice | {"disable_parallel_tool_use": not parallel}
        chat = translated({"tools": [TOOL_OF_CHAT], "tool_choice": asked})
        assert chat.choice == ToolChoice(expected, choice.get("name"), parallel)


def in_content(block: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}, USER_MESSAGE]}


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "`max_tokens` must be an integer"),
    "none to generate": ({"max_tokens": 0}, "`max_tokens` must be >= 1"),
    "no turns": ({"messages": []}, "`messages` must have at least 1 item"),
    "another role": (
        {"messages": [{"role": "tool", "content": "x"}]},
        "`messages[0].role` must be ",
    ),
    "another block": (
        {"messages": [{"role": "user", "content": [{"type": "telepathy"}]}]},
        "'telepathy' is not the type of a block",
    ),
    "another block in a result": (
        {
            "messages": [
                USER_MESSAGE,
                {"role": "assistant", "content": [CALL_BLOCK]},
                {"role": "user", "content": [RESULT | {"content": [{"type": "telepathy"}]}]},
            ]
        },
        "'telepathy' is not the type of a block",
    ),
    "a block whose type is a list": (
        in_content({"type": []}),
        "`messages[0].content[0]` must be a block of type 'text'",
    ),
    "a summary of nothing": (
        in_content({"type": "compaction", "content": ""}, "assistant"),
        "`messages[0].content[0].content` must have at least 1 character",
    ),
    "a document of another kind": (
        in_content({"type": "document", "source": {"type": "dream", "data": ""}}),
        "`messages[0].content[0].source` must be of type 'text' or 'content'",
    ),
    "a document whose kind is an object": (
        in_content({"type": "document", "source": {"type": {}}}),
        "`messages[0].content[0].source` must be of type 'text' or 'content'",
    ),
    "a call by the user": (
        in_content(CALL_BLOCK),
        "a turn of role 'user' has no block of type 'tool_use'",
    ),
    "a result by the assistant": (in_content(RESULT, "assistant"), "'tool_result'"),
    "another kind of thoughts": (
        {"thinking": {"type": "deep"}},
        "`thinking.type` must be 'enabled', 'adaptive', 'between_tools' or 'disabled'",
    ),
    "thoughts without room": (
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
        "`thinking.budget_tokens` must be >= 1",
    ),
    "a tool without a schema": ({"tools": [{"name": "add"}]}, "`tools[0].input_schema`"),
    "a tool whose type is a list": ({"tools": [{"type": []}]}, "`tools[0].type` must be a string"),
    "a tool whose type is an object": (
        {"tools": [{"type": {}}]},
        "`tools[0].type` must be a string",
    ),
    "a choice of no tool": ({"tool_choice": {"type": "tool"}}, "needs a `name`"),
    "a number as text": ({"top_k": "5"}, "`top_k` must be an integer"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_the_error_names_the_malformed_field(name: str) -> None:
    body, message = MALFORMED[name]
    with pytest.raises(BodyShapeError) as caught:
        translated(body)
    assert message in caught.value.client_text


def test_a_call_at_the_end_lacks_its_result() -> None:
    with pytest.raises(ValidationError, match="tool_result"):
        translated({"messages": [USER_MESSAGE, {"role": "assistant", "content": [CALL_BLOCK]}]})


def test_tokens_are_counted_without_the_fields_for_an_answer() -> None:
    asked = to_model(
        {"messages": [USER_MESSAGE], "system": "be kind", "tools": [TOOL_OF_CHAT]},
        CountTokensRequest,
    )
    assert chat_of(asked, MILLRACE).request == GenerationRequest(names=NAMES)
