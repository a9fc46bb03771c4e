"""The `anthropic` package against `/v1/messages`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import anthropic
from anthropic.types import Message, RawMessageStreamEvent
from cases import MESSAGES, QUESTION, WIND_SCHEMA, check_wind, raised, run
from kinds import Mill
from pydantic import TypeAdapter

MODEL = "tgi"
AT_ZERO: dict[str, Any] = {"extra_body": {"temperature": 0}}
"""This version of the package has no parameters for sampling; earlier ones have."""
GREEDY: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, **AT_ZERO}
TOOL: dict[str, Any] = {
    "name": "wind",
    "description": "Asks for wind.",
    "input_schema": WIND_SCHEMA,
}
CALLING: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "max_tokens": 200,
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "wind"},
}


def client(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url, api_key="-", max_retries=0)


def text_of(message: Message) -> str:
    """The text of a message that is nothing else."""
    (block,) = message.content
    assert block.type == "text"
    return block.text


def a_message_is_answered(base_url: str) -> None:
    messages = client(base_url).messages
    message = messages.create(max_tokens=8, **GREEDY)
    assert text_of(message)
    assert (message.type, message.role) == ("message", "assistant")
    assert message.stop_reason in {"end_turn", "max_tokens"}
    assert 0 < message.usage.output_tokens <= 8
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
    assert message.id.startswith("msg_")
    assert message._request_id
    assert message.id != messages.create(max_tokens=8, **GREEDY).id


def answers_and_events_are_of_the_documented_types(base_url: str) -> None:
    """The package itself checks nothing; its models do, when they are asked to."""
    events: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    messages = client(base_url).messages.with_raw_response
    for options in ({"max_tokens": 8, **GREEDY}, CALLING):
        Message.model_validate_json(messages.create(**options).text(), strict=True)
        streamed = messages.create(stream=True, **options).text()
        blocks = [block.split("\n") for block in streamed.split("\n\n") if block]
        for name, data in blocks:
            if name != "event: ping":
                event = events.validate_json(data.removeprefix("data: "), strict=True)
                assert event.type == name.removeprefix("event: ")


def a_stream_says_what_the_whole_message_says(base_url: str) -> None:
    messages = client(base_url).messages
    whole = messages.create(max_tokens=12, **GREEDY)
    with messages.stream(max_tokens=12, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert (final.stop_reason, final.model) == (whole.stop_reason, whole.model)
    assert final.usage.output_tokens == whole.usage.output_tokens
    raw = messages.create(max_tokens=12, stream=True, **GREEDY)
    deltas = [event.delta.text for event in raw if event.type == "content_block_delta"]
    assert "".join(deltas) == text


def limits_and_stop_sequences_are_told(base_url: str) -> None:
    create = client(base_url).messages.create
    cut = create(max_tokens=2, **GREEDY)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    whole = text_of(create(max_tokens=16, **GREEDY))
    stop = whole[len(whole) // 2 :][:3]
    options = {"max_tokens": 16, "stop_sequences": ["\x07", stop], **GREEDY}
    stopped = create(**options)
    assert text_of(stopped) == whole[: whole.index(stop)]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    with client(base_url).messages.stream(**options) as stream:
        final = stream.get_final_message()
    assert text_of(final) == text_of(stopped)
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)


def content_comes_as_text_or_in_blocks(base_url: str) -> None:
    create = client(base_url).messages.create
    question = MESSAGES[0]["content"]
    in_blocks = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    plain = create(max_tokens=6, system="Be brief.", **GREEDY)
    blocks = create(
        **GREEDY | {"messages": in_blocks},
        max_tokens=6,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    )
    assert text_of(plain) == text_of(blocks)


def what_the_assistant_began_is_gone_on_with(base_url: str) -> None:
    create = client(base_url).messages.create
    whole = text_of(create(max_tokens=16, **GREEDY))
    beginning = " ".join(whole.split(" ")[:2])
    begun = [*MESSAGES, {"role": "assistant", "content": beginning}]
    rest = text_of(create(**GREEDY | {"messages": begun}, max_tokens=12))
    assert whole.startswith(beginning + rest) or (beginning + rest).startswith(whole)


def tokens_are_counted_as_they_are_charged(base_url: str) -> None:
    messages = client(base_url).messages
    for more in ({}, {"system": "Be brief.", "tools": [TOOL]}):
        counted = messages.count_tokens(model=MODEL, messages=MESSAGES, **more).input_tokens
        usage = messages.create(max_tokens=1, **GREEDY, **more).usage
        assert counted == usage.input_tokens + usage.cache_read_input_tokens


def a_tool_is_called_and_its_result_answered(base_url: str) -> None:
    messages = client(base_url).messages
    message = messages.create(**CALLING)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name) == ("tool_use", "wind")
    assert call.id.startswith("toolu_")
    check_wind(call.input)
    for is_error in (False, True):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "calm"}
        conversation = [
            *QUESTION,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result | {"is_error": is_error}]},
        ]
        answer = messages.create(model=MODEL, max_tokens=8, messages=conversation, tools=[TOOL])
        assert answer.content


def any_tool_may_be_forced_and_none(base_url: str) -> None:
    create = client(base_url).messages.create
    options = CALLING | AT_ZERO
    forced = create(**options | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
    (call,) = forced.content
    assert call.name == "wind"
    none = create(**options | {"tool_choice": {"type": "none"}})
    assert all(block.type == "text" for block in none.content)


def a_call_is_streamed(base_url: str) -> None:
    messages = client(base_url).messages
    options = CALLING | AT_ZERO
    (whole,) = messages.create(**options).content
    with messages.stream(**options) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (call,) = final.content
    assert (call.name, call.input) == (whole.name, whole.input)
    assert len(parts) > 1
    assert final.stop_reason == "tool_use"


def parse_gives_an_object_of_the_asked_kind(base_url: str) -> None:
    parsed = client(base_url).messages.parse(
        model=MODEL, messages=MESSAGES, max_tokens=200, output_format=Mill
    )
    assert isinstance(parsed.parsed_output, Mill)


def a_bad_request_is_an_error_with_its_reason(base_url: str) -> None:
    create = client(base_url).messages.create
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/mill.png"}}
    for stream in (False, True):
        for more, reason in (
            ({"extra_body": {"temperature": -1.0}}, "temperature"),
            ({"messages": [{"role": "user", "content": [image]}]}, "images"),
            ({"messages": [{"role": "user", "content": [{"type": "film"}]}]}, "film"),
            ({"thinking": {"type": "sometimes"}}, "thinking"),
        ):
            options = {**GREEDY, "max_tokens": 4, "stream": stream, **more}
            error = raised(anthropic.BadRequestError, partial(create, **options))
            assert error.body["error"]["type"] == "invalid_request_error"
            assert reason in error.body["error"]["message"]
            assert error.request_id == error.body["request_id"]


def what_is_not_there_is_not_found(base_url: str) -> None:
    error = raised(
        anthropic.NotFoundError, partial(client(base_url).messages.batches.retrieve, "b")
    )
    assert error.body["error"]["type"] == "not_found_error"


def streams_run_side_by_side(base_url: str) -> None:
    async def one(asynchronous: anthropic.AsyncAnthropic, number: int) -> Message:
        async with asynchronous.messages.stream(
            model=MODEL,
            max_tokens=8,
            messages=[{"role": "user", "content": f"Count to {number}"}],
        ) as stream:
            return await stream.get_final_message()

    async def all_of_them() -> list[Message]:
        options = {"base_url": base_url, "api_key": "-", "max_retries": 0}
        async with anthropic.AsyncAnthropic(**options) as asynchronous:
            whole = await asynchronous.messages.create(max_tokens=4, **GREEDY)
            assert text_of(whole)
            return await asyncio.gather(*(one(asynchronous, number) for number in range(8)))

    answers = asyncio.run(all_of_them())
    assert all(answer.stop_reason in {"end_turn", "max_tokens"} for answer in answers)
    assert len({answer.id for answer in answers}) == len(answers)


def a_client_that_leaves_disturbs_no_other_request(base_url: str) -> None:
    create = client(base_url).messages.create
    stream = create(max_tokens=200, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    assert text_of(create(max_tokens=4, **GREEDY))


run(globals())
