"""`litellm`: its `openai/` and `huggingface/` providers, both to `/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import openai
from cases import (
    MESSAGES,
    PROMPT,
    QUESTION,
    TOOLS,
    WIND_SCHEMA,
    check_call,
    check_wind,
    raised,
    run,
)

litellm.suppress_debug_info = True
litellm.telemetry = False


def providers(base_url: str) -> list[dict[str, Any]]:
    """The arguments that select each provider; `huggingface/` adds `/v1` on its own."""
    return [
        {"model": "openai/tgi", "api_base": f"{base_url}/v1", "api_key": "-"},
        {"model": "huggingface/tgi", "api_base": base_url, "api_key": "-"},
    ]


def chat_answers_and_streams(base_url: str) -> None:
    answers = set()
    for provider in providers(base_url):
        options = {**provider, "messages": MESSAGES, "temperature": 0, "max_tokens": 10}
        whole = litellm.completion(**options)
        choice = whole.choices[0]
        assert choice.message.content
        assert choice.finish_reason in {"stop", "length"}
        usage = whole.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        chunks = list(
            litellm.completion(**options, stream=True, stream_options={"include_usage": True})
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == choice.message.content
        assert chunks[-1].usage.completion_tokens == usage.completion_tokens
        rebuilt = litellm.stream_chunk_builder(chunks)
        assert rebuilt.choices[0].finish_reason == choice.finish_reason
        answers.add(text)
    assert len(answers) == 1


def the_asynchronous_call_says_the_same(base_url: str) -> None:
    async def both(options: dict[str, Any]) -> tuple[str, str]:
        whole = await litellm.acompletion(**options)
        stream = await litellm.acompletion(**options, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(pieces), whole.choices[0].message.content

    for provider in providers(base_url):
        options = {**provider, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
        streamed, whole = asyncio.run(both(options))
        assert streamed == whole


def text_completion_answers(base_url: str) -> None:
    options = {
        "model": "text-completion-openai/tgi",
        "api_base": f"{base_url}/v1",
        "api_key": "-",
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = litellm.text_completion(**options)
    assert whole.choices[0].text
    pieces = [
        chunk.choices[0].text or "" for chunk in litellm.text_completion(**options, stream=True)
    ]
    assert "".join(pieces) == whole.choices[0].text


def a_schema_binds_the_answer(base_url: str) -> None:
    for provider in providers(base_url):
        answer = litellm.completion(
            **provider,
            messages=MESSAGES,
            max_tokens=200,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "wind", "schema": WIND_SCHEMA, "strict": True},
            },
        )
        check_wind(json.loads(answer.choices[0].message.content))


def tools_are_called(base_url: str) -> None:
    for provider in providers(base_url):
        options = {
            **provider,
            "messages": QUESTION,
            "tools": TOOLS,
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 150,
        }
        whole = litellm.completion(**options)
        assert whole.choices[0].finish_reason == "tool_calls"
        calls = whole.choices[0].message.tool_calls
        for call in calls:
            check_call(call.function.name, json.loads(call.function.arguments))
        chunks = list(litellm.completion(**options, stream=True))
        rebuilt = litellm.stream_chunk_builder(chunks).choices[0]
        assert rebuilt.finish_reason == "tool_calls"
        streamed = rebuilt.message.tool_calls
        assert [call.function.arguments for call in streamed] == [
            call.function.arguments for call in calls
        ]
        assert not {call.id for call in streamed} & {call.id for call in calls}


def a_bad_request_is_the_client_s_error(base_url: str) -> None:
    for provider in providers(base_url):
        options = {**provider, "messages": MESSAGES, "temperature": -1, "num_retries": 0}
        error = raised(openai.APIError, lambda bad=options: litellm.completion(**bad))
        assert "temperature" in str(error)


run(globals())
