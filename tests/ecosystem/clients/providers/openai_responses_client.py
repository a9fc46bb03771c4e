"""Responses with the `openai` package; answers and events are also held against its own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import openai
from cases import GRIND_SCHEMA, PROMPT, WIND_SCHEMA, check_call, check_wind, raised, run
from kinds import Mill
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

MODEL = "tgi"
OPTIONS: dict[str, Any] = {
    "model": MODEL,
    "input": "What does a mill do?",
    "temperature": 0,
    "max_output_tokens": 12,
}
WIND = {"type": "function", "name": "wind", "description": "Asks.", "parameters": WIND_SCHEMA}
GRIND = {"type": "function", "name": "grind", "description": "Asks.", "parameters": GRIND_SCHEMA}
TOOLS: dict[str, Any] = {"tools": [WIND, GRIND], "max_output_tokens": 150}
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)


def ask(base_url: str, **more: Any) -> Response:
    """The answer, validated; the package itself takes whatever comes."""
    create = client(base_url).responses.with_raw_response.create
    return Response.model_validate_json(create(**{**OPTIONS, **more}).text)


def listen(base_url: str, **more: Any) -> list[ResponseStreamEvent]:
    """The events of the same question streamed, validated."""
    create = client(base_url).responses.with_streaming_response.create
    with create(**{**OPTIONS, "stream": True, **more}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return [EVENT.validate_json(line.removeprefix("data: ")) for line in lines]


def a_text_is_answered(base_url: str) -> None:
    answer = ask(base_url, metadata={"mill": "wind"})
    assert answer.output_text
    assert answer.status in {"completed", "incomplete"}
    assert answer.metadata == {"mill": "wind"}
    assert answer.usage.output_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert ask(base_url).id != answer.id


def the_same_is_said_in_items_and_in_a_chat(base_url: str) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "What does a mill do?"}]},
    ]
    text = ask(base_url, instructions="Be brief.").output_text
    assert ask(base_url, input=turns).output_text == text
    chat = client(base_url).chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": OPTIONS["input"]},
        ],
        temperature=0,
        max_tokens=12,
    )
    assert chat.choices[0].message.content == text


def a_stream_says_what_the_whole_answer_says(base_url: str) -> None:
    whole = ask(base_url)
    events = listen(base_url)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[-1].type == f"response.{whole.status}"
    assert events[-1].response.output_text == text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def the_stream_helper_adds_events_up(base_url: str) -> None:
    whole = ask(base_url, max_output_tokens=None, text={"format": {"type": "json_object"}})
    if whole.status != "completed":
        return
    with client(base_url).responses.stream(
        model=MODEL, input=OPTIONS["input"], temperature=0, text={"format": {"type": "json_object"}}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == whole.output_text


def the_stream_helper_parses(base_url: str) -> None:
    with client(base_url).responses.stream(
        model=MODEL, input=OPTIONS["input"], text_format=Mill, max_output_tokens=60
    ) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Mill)
    assert snapshots[-1] == final.output_text


def parse_gives_an_object_of_the_asked_kind(base_url: str) -> None:
    answer = client(base_url).responses.parse(
        model=MODEL, input=PROMPT, text_format=Mill, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, Mill)
    assert answer.status == "completed"


def functions_are_called_and_answered(base_url: str) -> None:
    asked = {"role": "user", "content": "Which way does the wind blow?"}
    choice = {"type": "function", "name": "wind"}
    answer = ask(base_url, input=[asked], tool_choice=choice, **TOOLS)
    (call,) = calls_of(answer.output)
    assert call.name == "wind"
    check_wind(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "north"}
    turns = [asked, *[item.model_dump(exclude_none=True) for item in answer.output], result]
    again = ask(base_url, input=turns, tool_choice="none", **{**TOOLS, "max_output_tokens": 8})
    assert again.output_text


def calls_of(items: Sequence[Any]) -> list[ResponseFunctionToolCall]:
    """The calls among items: a model of this quality is cut in the middle of its fourth, which only a stream has."""
    return [item for item in items if item.type == "function_call"]


def required_calls_are_streamed(base_url: str) -> None:
    whole = calls_of(ask(base_url, tool_choice="required", **TOOLS).output)
    events = listen(base_url, tool_choice="required", **TOOLS)
    calls = calls_of([e.item for e in events if e.type == "response.output_item.done"])
    assert calls
    for call in calls:
        pieces = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.item_id == call.id
        ]
        assert "".join(pieces) == call.arguments
    for call in whole:
        assert call.status == "completed"
        check_call(call.name, json.loads(call.arguments))
    assert [(call.name, call.arguments) for call in calls if call.status == "completed"] == [
        (call.name, call.arguments) for call in whole
    ]
    assert len({call.call_id for call in (*calls, *whole)}) == len(calls) + len(whole)


def pydantic_tools_are_parsed(base_url: str) -> None:
    tool = openai.pydantic_function_tool(Mill)["function"]
    flat = {"type": "function", **tool}
    answer = client(base_url).responses.parse(
        model=MODEL,
        input=PROMPT,
        tools=[flat],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=150,
    )
    (call,) = answer.output
    Mill.model_validate_json(call.arguments)


def log_probabilities_are_told(base_url: str) -> None:
    answer = ask(base_url, include=["message.output_text.logprobs"], top_logprobs=2)
    (message,) = answer.output
    (part,) = message.content
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def what_needs_a_memory_is_refused(base_url: str) -> None:
    create = client(base_url).responses.create
    refused = openai.UnprocessableEntityError
    for name, kind, more in (
        ("previous_response_id", openai.BadRequestError, {"previous_response_id": "resp_1"}),
        ("msg_1", openai.BadRequestError, {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("conversation", refused, {"conversation": "conv_1"}),
        ("background", refused, {"background": True}),
        ("temperature", refused, {"temperature": -1.0}),
    ):
        for stream in (False, True):
            error = raised(kind, partial(create, **{**OPTIONS, "stream": stream, **more}))
            assert name in error.message, error.message


def tools_of_openai_are_left_out_and_named(base_url: str) -> None:
    tools = [{"type": "web_search"}, {"type": "image_generation"}]
    create = client(base_url).responses.with_raw_response.create
    answer = create(**{**OPTIONS, "tools": tools})
    assert answer.headers["x-millrace-ignored"] == "tools.web_search, tools.image_generation"
    assert Response.model_validate_json(answer.text).output_text == ask(base_url).output_text


def the_input_of_a_custom_tool_is_a_text(base_url: str) -> None:
    written = {"type": "grammar", "syntax": "regex", "definition": "(rye|oats)\\n"}
    tools = [{"type": "custom", "name": "note", "format": written}]
    more = {"tools": tools, "tool_choice": {"type": "custom", "name": "note"}}
    options = {**more, "max_output_tokens": 60}
    (call,) = ask(base_url, **options).output
    assert call.type == "custom_tool_call"
    assert call.input in {"rye\n", "oats\n"}
    events = listen(base_url, **options)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input
    assert events[-1].response.output[0].input == call.input


def tokens_are_counted(base_url: str) -> None:
    count = client(base_url).responses.input_tokens.count(model=MODEL, input=OPTIONS["input"])
    assert count.input_tokens == ask(base_url).usage.input_tokens


def nothing_is_stored(base_url: str) -> None:
    answer = ask(base_url, store=True)
    responses = client(base_url).responses
    for call in (responses.retrieve, responses.delete):
        error = raised(openai.NotFoundError, partial(call, answer.id))
        assert answer.id in error.message


def streams_run_side_by_side(base_url: str) -> None:
    async def one(asynchronous: openai.AsyncOpenAI, number: int) -> str:
        asked = {**OPTIONS, "input": f"Count to {number}"}
        stream = await asynchronous.responses.create(**asked, stream=True)
        return [event async for event in stream][-1].type

    async def all_of_them() -> list[str]:
        options = {"base_url": f"{base_url}/v1", "api_key": "-", "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as asynchronous:
            return await asyncio.gather(*(one(asynchronous, number) for number in range(12)))

    ends = asyncio.run(all_of_them())
    assert set(ends) <= {"response.completed", "response.incomplete"}


run(globals())
