"""Tools with the `openai` package; answers are also held against its own response types."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
from cases import (
    GRIND,
    QUESTION,
    TOOLS,
    WIND,
    WIND_SCHEMA,
    check_calls,
    check_wind,
    raised,
    run,
    tool,
)
from kinds import Wind
from openai.types.chat import ChatCompletion, ChatCompletionChunk

MODEL = "tgi"
OPTIONS: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "tools": TOOLS,
    "temperature": 0,
    "max_tokens": 150,
    # A model this small may go on calling for ever where it may call more than once.
    "parallel_tool_calls": False,
}
NAMED = {"type": "function", "function": {"name": "wind"}}


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)


def ask(base_url: str, **more: Any) -> ChatCompletion:
    """The answer, validated; the package itself takes whatever comes."""
    create = client(base_url).chat.completions.with_raw_response.create
    return ChatCompletion.model_validate_json(create(**{**OPTIONS, **more}).text)


def listen(base_url: str, **more: Any) -> list[ChatCompletionChunk]:
    """The chunks of the same question streamed, validated."""
    create = client(base_url).chat.completions.with_streaming_response.create
    with create(**{**OPTIONS, "stream": True, **more}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [ChatCompletionChunk.model_validate_json(line) for line in lines]


def joined(chunks: list[ChatCompletionChunk]) -> list[dict[str, str]]:
    """The calls that the deltas make up; a call's first delta has all but the arguments."""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                if delta.index == len(calls):
                    assert delta.id
                    assert delta.type == "function"
                    assert delta.function.name
                    calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
                else:
                    assert delta.index == len(calls) - 1
                    assert not delta.id
                    assert not delta.function.name
                calls[delta.index]["arguments"] += delta.function.arguments or ""
    return calls


def what_was_called(answer: ChatCompletion) -> list[tuple[str, str]]:
    calls = answer.choices[0].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls]


def required_calls_one_of_the_tools(base_url: str) -> None:
    first = ask(base_url, tool_choice="required")
    second = ask(base_url, tool_choice="required")
    for answer in (first, second):
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        assert len(choice.message.tool_calls) == 1
        check_calls(choice.message.tool_calls)
        usage = answer.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.completion_tokens > 0
    assert what_was_called(first) == what_was_called(second)
    assert first.choices[0].message.tool_calls[0].id != second.choices[0].message.tool_calls[0].id


def a_named_tool_is_the_one_called(base_url: str) -> None:
    for wanted in (WIND, GRIND):
        name = wanted["function"]["name"]
        choice = {"type": "function", "function": {"name": name}}
        answer = ask(base_url, tool_choice=choice)
        check_calls(answer.choices[0].message.tool_calls)
        assert {called for called, _ in what_was_called(answer)} == {name}


def streamed_deltas_make_up_the_whole_call(base_url: str) -> None:
    for choice in ("required", NAMED):
        whole = ask(base_url, tool_choice=choice)
        *chunks, last = listen(base_url, tool_choice=choice, stream_options={"include_usage": True})
        calls = joined(chunks)
        assert [(call["name"], call["arguments"]) for call in calls] == what_was_called(whole)
        assert len({call["id"] for call in calls}) == len(calls)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
        assert last.choices == []
        assert last.usage == whole.usage
        assert len({chunk.id for chunk in [*chunks, last]}) == 1


def arguments_come_in_pieces(base_url: str) -> None:
    chunks = listen(base_url, tool_choice=NAMED)
    pieces = [
        delta.function.arguments
        for chunk in chunks
        for delta in chunk.choices[0].delta.tool_calls or []
        if delta.function.arguments
    ]
    assert len(pieces) > 2
    check_wind(json.loads("".join(pieces)))


def none_answers_in_words(base_url: str) -> None:
    answer = ask(base_url, tool_choice="none", max_tokens=12)
    choice = answer.choices[0]
    assert choice.message.content
    assert not choice.message.tool_calls
    assert choice.finish_reason in {"stop", "length"}
    chunks = listen(base_url, tool_choice="none", max_tokens=12)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert joined(chunks) == []


def auto_answers_or_calls(base_url: str) -> None:
    whole = ask(base_url, tool_choice="auto")
    by_default = ask(base_url)
    assert what_was_called(by_default) == what_was_called(whole)
    choice = whole.choices[0]
    assert choice.message.content or choice.message.tool_calls
    assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
    chunks = listen(base_url, tool_choice="auto")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == (choice.message.content or "")
    streamed = [(call["name"], call["arguments"]) for call in joined(chunks)]
    assert streamed == what_was_called(whole)
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason


def parallel_calls_are_told_apart(base_url: str) -> None:
    whole = ask(base_url, tool_choice="required", parallel_tool_calls=True).choices[0]
    assert whole.finish_reason in {"tool_calls", "length"}
    check_calls(whole.message.tool_calls)
    calls = joined(listen(base_url, tool_choice="required", parallel_tool_calls=True))
    assert [(call["name"], call["arguments"]) for call in calls] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls
    ]
    assert len({call["id"] for call in calls}) == len(calls)


def ids_differ_between_choices(base_url: str) -> None:
    answer = ask(base_url, tool_choice="required", n=3, temperature=1.5, seed=4)
    calls = [call for choice in answer.choices for call in choice.message.tool_calls]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    check_calls(calls)


def a_result_goes_back_and_is_answered(base_url: str) -> None:
    called = ask(base_url, tool_choice="required").choices[0].message
    messages = [
        *QUESTION,
        called.model_dump(exclude_none=False),
        *(
            {"role": "tool", "tool_call_id": call.id, "content": "from the west"}
            for call in called.tool_calls
        ),
    ]
    answer = ask(base_url, messages=messages, tool_choice="none", max_tokens=12)
    assert answer.choices[0].message.content
    alone = ask(base_url, tool_choice="none", max_tokens=12)
    assert answer.usage.prompt_tokens > alone.usage.prompt_tokens


def calls_stay_unlike_over_a_conversation(base_url: str) -> None:
    messages = [*QUESTION]
    seen = set()
    for turn in range(3):
        message = ask(base_url, messages=messages, tool_choice=NAMED).choices[0].message
        seen |= {call.id for call in message.tool_calls}
        assert len(seen) == turn + 1
        messages.append({**message.model_dump(exclude_none=True), "content": None})
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "west"}]}
            for call in message.tool_calls
        ]


def parse_gives_arguments_of_the_asked_kind(base_url: str) -> None:
    answer = client(base_url).chat.completions.parse(
        model=MODEL,
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Wind, name="wind")],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=150,
    )
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Wind)


def the_event_stream_ends_in_the_whole_answer(base_url: str) -> None:
    create = {**OPTIONS, "tools": [openai.pydantic_function_tool(Wind, name="wind")]}
    with client(base_url).chat.completions.stream(**create, tool_choice="required") as stream:
        events = list(stream)
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Wind)
    pieces = [
        event.arguments_delta
        for event in events
        if event.type == "tool_calls.function.arguments.delta" and event.index == 0
    ]
    assert "".join(pieces) == call.function.arguments
    assert sum(event.type == "tool_calls.function.arguments.done" for event in events) == len(
        final.choices[0].message.tool_calls
    )
    assert final.choices[0].finish_reason == "tool_calls"


def a_call_that_is_cut_is_no_call_of_its_own(base_url: str) -> None:
    answer = ask(base_url, tool_choice="required", max_tokens=4)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 4


def a_strict_tool_is_bound_by_its_schema(base_url: str) -> None:
    strict = tool("wind", WIND_SCHEMA, strict=True)
    answer = ask(base_url, tools=[strict], tool_choice="auto", temperature=1.5, seed=2)
    for name, arguments in what_was_called(answer):
        assert name == "wind"
        check_wind(json.loads(arguments))


def a_tool_without_parameters_is_called_with_none(base_url: str) -> None:
    bare = {"type": "function", "function": {"name": "stop_the_wheel"}}
    answer = ask(base_url, tools=[bare], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "stop_the_wheel"
    assert json.loads(call.function.arguments) == {}


def only_allowed_tools_are_called(base_url: str) -> None:
    for name in ("wind", "grind"):
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        answer = ask(base_url, tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name


def what_cannot_be_called_is_refused(base_url: str) -> None:
    wrong = tool("wind", {"type": "no such type"})
    # A tool that is not strict goes without what cannot be compiled.
    wrong["function"]["strict"] = True
    refused: tuple[dict[str, Any], ...] = (
        {"tool_choice": {"type": "function", "function": {"name": "missing"}}},
        {"tool_choice": "sometimes"},
        {"tools": [wrong], "tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [{"type": "custom", "custom": {"name": "wind"}}]},
        {"functions": [{"name": "wind", "parameters": WIND_SCHEMA}]},
        {"function_call": {"name": "wind"}},
    )
    for more in refused:
        for stream in (False, True):
            asked = {**OPTIONS, **more, "stream": stream}
            create = client(base_url).chat.completions.create
            error = raised(openai.APIStatusError, partial(create, **asked))
            assert error.status_code in {400, 422}, (more, error.status_code)
            assert error.body["message"], more


run(globals())
