"""`langchain-openai` and `langchain-huggingface` against a base URL."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from cases import PROMPT, WIND_SCHEMA, check_wind, raised, run
from kinds import Wind
from langchain.agents import create_agent
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_huggingface import HuggingFaceEndpoint
from langchain_openai import ChatOpenAI, OpenAI

MESSAGES = [SystemMessage("Be brief."), HumanMessage("What does a mill do?")]


@tool
def wind(place: Literal["river", "sea"], strong: bool) -> str:
    """The wind's direction."""
    return f"west at the {place}"


def chat(base_url: str, **more: Any) -> ChatOpenAI:
    options = {"temperature": 0, "max_tokens": 12, "max_retries": 0, **more}
    return ChatOpenAI(model="tgi", base_url=f"{base_url}/v1", api_key="-", **options)


def chat_answers_and_streams(base_url: str) -> None:
    model = chat(base_url)
    whole = model.invoke(MESSAGES)
    assert whole.content
    assert whole.response_metadata["finish_reason"] in {"stop", "length"}
    usage = whole.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    chunks = list(model.stream(MESSAGES, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    total = sum(chunks[1:], chunks[0])
    assert isinstance(total, AIMessageChunk)
    assert total.usage_metadata["output_tokens"] == usage["output_tokens"]


def a_batch_answers_in_order(base_url: str) -> None:
    model = chat(base_url)
    questions = [[HumanMessage(f"Count to {number}")] for number in range(4)]
    alone = [model.invoke(question).content for question in questions]
    assert [answer.content for answer in model.batch(questions)] == alone


def the_asynchronous_chat_says_the_same(base_url: str) -> None:
    async def both() -> tuple[str, str]:
        model = chat(base_url)
        pieces = [chunk.content async for chunk in model.astream(MESSAGES)]
        return "".join(pieces), (await model.ainvoke(MESSAGES)).content

    streamed, whole = asyncio.run(both())
    assert streamed == whole


def log_probabilities_are_told(base_url: str) -> None:
    answer = chat(base_url, max_tokens=3).bind(logprobs=True, top_logprobs=2).invoke(MESSAGES)
    entries = answer.response_metadata["logprobs"]["content"]
    assert len(entries) == answer.usage_metadata["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def structured_output_has_the_asked_kind(base_url: str) -> None:
    model = chat(base_url, max_tokens=150)
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Wind, method=method).invoke(MESSAGES)
        assert isinstance(answer, Wind), method
    as_json = model.with_structured_output({"title": "wind", **WIND_SCHEMA}, method="json_schema")
    check_wind(as_json.invoke(MESSAGES))


def tools_are_called_as_bound(base_url: str) -> None:
    for choice in ("any", "wind"):
        model = chat(base_url, max_tokens=150).bind_tools([wind], tool_choice=choice)
        whole = model.invoke(MESSAGES)
        assert whole.response_metadata["finish_reason"] == "tool_calls"
        assert not whole.invalid_tool_calls
        for call in whole.tool_calls:
            assert call["name"] == "wind"
            check_wind(call["args"])
        chunks = list(model.stream(MESSAGES))
        total = sum(chunks[1:], chunks[0])
        assert [call["args"] for call in total.tool_calls] == [
            call["args"] for call in whole.tool_calls
        ]
        assert not {call["id"] for call in total.tool_calls} & {
            call["id"] for call in whole.tool_calls
        }


def a_tool_s_answer_goes_back(base_url: str) -> None:
    called = chat(base_url, max_tokens=150).bind_tools([wind], tool_choice="any").invoke(MESSAGES)
    results = [wind.invoke(call) for call in called.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    answer = (
        chat(base_url).bind_tools([wind], tool_choice="none").invoke([*MESSAGES, called, *results])
    )
    assert answer.content
    assert not answer.tool_calls


def an_agent_ends(base_url: str) -> None:
    agent = create_agent(chat(base_url), [wind])
    state = agent.invoke({"messages": [HumanMessage("Hello")]}, {"recursion_limit": 6})
    last = state["messages"][-1]
    assert isinstance(last, AIMessage)
    assert last.content


def a_bad_request_is_the_client_s_error(base_url: str) -> None:
    error = raised(openai.APIStatusError, lambda: chat(base_url, temperature=-1).invoke(MESSAGES))
    assert error.status_code == 422
    assert "temperature" in str(error.body)


def completions_take_the_class_s_defaults(base_url: str) -> None:
    model = OpenAI(
        model="tgi", base_url=f"{base_url}/v1", api_key="-", temperature=0, max_tokens=8, top_p=1
    )
    whole = model.invoke(PROMPT)
    assert whole
    assert "".join(model.stream(PROMPT)) == whole
    both = model.generate([PROMPT, "Once"])
    assert [len(choices) for choices in both.generations] == [1, 1]
    assert both.generations[0][0].text == whole


def endpoint(base_url: str, **more: Any) -> HuggingFaceEndpoint:
    """The class sends a temperature of its own, so it samples: the seed makes answers alike."""
    return HuggingFaceEndpoint(endpoint_url=base_url, seed=5, return_full_text=False, **more)


def an_endpoint_answers_and_streams(base_url: str) -> None:
    model = endpoint(base_url, max_new_tokens=8)
    whole = model.invoke(PROMPT)
    assert whole
    assert "".join(model.stream(PROMPT)).startswith(whole)
    assert asyncio.run(model.ainvoke(PROMPT)) == whole


def an_endpoint_s_stop_sequence_is_cut(base_url: str) -> None:
    model = endpoint(base_url, max_new_tokens=16)
    whole = model.invoke(PROMPT)
    # The class looks for it at the text's end alone, so it has to end where a token does.
    stop = whole.split()[4]
    assert model.invoke(PROMPT, stop=[stop]) == whole[: whole.index(stop)]


def json_mode_gives_an_object(base_url: str) -> None:
    model = chat(base_url, max_tokens=200).bind(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "wind", "schema": WIND_SCHEMA, "strict": True},
        }
    )
    check_wind(json.loads(model.invoke(MESSAGES).content))


run(globals())
