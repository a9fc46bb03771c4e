"""Tools and the asynchronous chat of `huggingface_hub`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from cases import MESSAGES, QUESTION, TOOLS, check_call, check_calls, check_wind, raised, run
from huggingface_hub import AsyncInferenceClient, ChatCompletionInputFunctionName, InferenceClient
from huggingface_hub.errors import HfHubHTTPError

OPTIONS: dict[str, Any] = {"tools": TOOLS, "temperature": 0, "max_tokens": 150}


def ask(base_url: str, choice: Any, **more: Any) -> Any:
    options = {"messages": QUESTION, **OPTIONS, **more}
    return InferenceClient(base_url).chat_completion(tool_choice=choice, **options).choices[0]


def joined(deltas: list[Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call that the deltas make up."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id
                calls.append((call.function.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = (name, arguments + (call.function.arguments or ""))
    return calls


def called(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


def required_calls_one_of_the_tools(base_url: str) -> None:
    choice = ask(base_url, "required")
    assert choice.finish_reason == "tool_calls"
    assert choice.message.role == "assistant"
    check_calls(choice.message.tool_calls)


def a_named_tool_is_the_one_called(base_url: str) -> None:
    # What the client builds has no `type`; OpenAI's has.
    by_class = {"function": ChatCompletionInputFunctionName(name="wind")}
    by_name = {"type": "function", "function": {"name": "wind"}}
    for wanted in (by_class, by_name):
        for name, arguments in called(ask(base_url, wanted)):
            assert name == "wind"
            check_wind(json.loads(arguments))


def a_stream_makes_up_the_whole_call(base_url: str) -> None:
    client = InferenceClient(base_url)
    stream = client.chat_completion(
        QUESTION,
        tool_choice="required",
        stream=True,
        stream_options={"include_usage": True},
        **OPTIONS,
    )
    *chunks, last = list(stream)
    whole = ask(base_url, "required")
    assert joined([chunk.choices[0].delta for chunk in chunks]) == called(whole)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert last.usage.completion_tokens > 0


def auto_answers_or_calls(base_url: str) -> None:
    choice = ask(base_url, "auto")
    assert choice.message.content or choice.message.tool_calls
    for call in choice.message.tool_calls or []:
        check_call(call.function.name, json.loads(call.function.arguments))


def none_answers_in_words(base_url: str) -> None:
    choice = ask(base_url, "none", max_tokens=8)
    assert choice.message.content
    assert not choice.message.tool_calls


def a_result_goes_back_and_is_answered(base_url: str) -> None:
    message = ask(base_url, "required").message
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in message.tool_calls
    ]
    history = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "west"} for call in calls),
    ]
    assert ask(base_url, "none", messages=history, max_tokens=8).message.content


def the_prompt_for_tools_is_taken(base_url: str) -> None:
    choice = ask(base_url, "required", tool_prompt="Use one of these functions: ")
    check_calls(choice.message.tool_calls)


def a_tool_that_is_none_raises_with_its_reason(base_url: str) -> None:
    unknown = {"type": "function", "function": {"name": "missing"}}
    error = raised(HfHubHTTPError, lambda: ask(base_url, unknown))
    assert error.response.status_code in {400, 422}
    assert "missing" in str(error)


def the_asynchronous_client_does_the_same(base_url: str) -> None:
    async def both() -> tuple[str, str, list[tuple[str, str]]]:
        client = AsyncInferenceClient(base_url)
        options = {"temperature": 0, "max_tokens": 8}
        whole = await client.chat_completion(MESSAGES, **options)
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat_completion(MESSAGES, stream=True, **options)
        ]
        deltas = [
            chunk.choices[0].delta
            async for chunk in await client.chat_completion(
                QUESTION, tool_choice="required", stream=True, **OPTIONS
            )
        ]
        return "".join(pieces), whole.choices[0].message.content, joined(deltas)

    streamed, whole, calls = asyncio.run(both())
    assert streamed == whole
    assert calls == called(ask(base_url, "required"))


run(globals())
