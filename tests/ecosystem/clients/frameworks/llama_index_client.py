"""`llama-index-llms-openai-like` against `/v1`."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from cases import PROMPT, check_wind, raised, run
from kinds import Wind
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage("What does a mill do?")]


def wind(place: Literal["river", "sea"], strong: bool) -> str:
    """The wind's direction."""
    return f"west at the {place}"


WIND = FunctionTool.from_defaults(wind, fn_schema=Wind)


def model(base_url: str, **more: Any) -> OpenAILike:
    options = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "temperature": 0,
        "max_tokens": 12,
        "max_retries": 0,
        **more,
    }
    return OpenAILike(model="tgi", api_base=f"{base_url}/v1", api_key="-", **options)


def chat_answers_and_streams(base_url: str) -> None:
    llm = model(base_url)
    whole = llm.chat(MESSAGES)
    assert whole.message.role == "assistant"
    assert whole.message.content
    chunks = list(llm.stream_chat(MESSAGES))
    assert "".join(chunk.delta or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].message.content == whole.message.content


def the_asynchronous_chat_says_the_same(base_url: str) -> None:
    async def both() -> tuple[str | None, str | None]:
        llm = model(base_url)
        chunks = [chunk async for chunk in await llm.astream_chat(MESSAGES)]
        return chunks[-1].message.content, (await llm.achat(MESSAGES)).message.content

    streamed, whole = asyncio.run(both())
    assert streamed == whole


def completions_answer_and_stream(base_url: str) -> None:
    llm = model(base_url, is_chat_model=False)
    whole = llm.complete(PROMPT)
    assert whole.text
    assert list(llm.stream_complete(PROMPT))[-1].text == whole.text


def a_tool_is_called(base_url: str) -> None:
    llm = model(base_url, max_tokens=150)
    tools = [WIND]
    whole = llm.chat_with_tools(tools, chat_history=MESSAGES, tool_required=True)
    calls = llm.get_tool_calls_from_response(whole)
    for call in calls:
        assert call.tool_name == "wind"
        check_wind(call.tool_kwargs)
    last = list(llm.stream_chat_with_tools(tools, chat_history=MESSAGES, tool_required=True))[-1]
    streamed = llm.get_tool_calls_from_response(last)
    assert [call.tool_kwargs for call in streamed] == [call.tool_kwargs for call in calls]
    assert not {call.tool_id for call in streamed} & {call.tool_id for call in calls}


def predict_and_call_runs_the_tool(base_url: str) -> None:
    answer = model(base_url, max_tokens=150).predict_and_call(
        [WIND], chat_history=MESSAGES, tool_required=True
    )
    assert str(answer) in {"west at the river", "west at the sea"}


def a_structured_answer_has_the_asked_kind(base_url: str) -> None:
    for as_tool in (True, False):
        llm = model(
            base_url,
            max_tokens=150,
            is_function_calling_model=as_tool,
            should_use_structured_outputs=not as_tool,
        )
        answer = llm.as_structured_llm(Wind).chat(MESSAGES)
        assert isinstance(answer.raw, Wind), as_tool
        check_wind(json.loads(answer.message.content))


def a_bad_request_is_the_client_s_error(base_url: str) -> None:
    llm = model(base_url)
    error = raised(openai.APIStatusError, lambda: llm.chat(MESSAGES, top_p=-1))
    assert error.status_code == 422
    assert "top_p" in str(error.body)


run(globals())
