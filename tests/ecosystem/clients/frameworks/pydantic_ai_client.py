"""`pydantic-ai-slim`: it checks every answer against OpenAI's types."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import WIND_SCHEMA, check_wind, raised, run
from kinds import Wind
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

QUESTION = "What does a mill do?"


def model(base_url: str) -> OpenAIChatModel:
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="-")
    return OpenAIChatModel("tgi", provider=provider)


def agent(base_url: str, **more: Any) -> Agent[None, Any]:
    settings = ModelSettings(temperature=0, max_tokens=more.pop("max_tokens", 150))
    return Agent(model(base_url), model_settings=settings, **more)


def text_answers_and_streams(base_url: str) -> None:
    asked = agent(base_url, max_tokens=12)
    whole = asked.run_sync(QUESTION)
    assert whole.output
    assert 0 < whole.usage.output_tokens <= 12
    assert whole.usage.input_tokens > 0

    async def streamed() -> tuple[str, int]:
        async with asked.run_stream(QUESTION) as answer:
            pieces = [piece async for piece in answer.stream_text(delta=True, debounce_by=None)]
            return "".join(pieces), answer.usage.output_tokens

    assert asyncio.run(streamed()) == (whole.output, whole.usage.output_tokens)


def every_output_mode_gives_the_asked_kind(base_url: str) -> None:
    for kind in (ToolOutput(Wind), NativeOutput(Wind)):
        answer = agent(base_url, output_type=kind).run_sync(QUESTION)
        assert isinstance(answer.output, Wind), kind


def an_object_is_streamed(base_url: str) -> None:
    async def streamed(kind: Any) -> list[Wind]:
        async with agent(base_url, output_type=kind).run_stream(QUESTION) as answer:
            return [output async for output in answer.stream_output(debounce_by=None)]

    for kind in (ToolOutput(Wind), NativeOutput(Wind)):
        whole = agent(base_url, output_type=kind).run_sync(QUESTION)
        assert asyncio.run(streamed(kind))[-1] == whole.output


def request(base_url: str, messages: list[ModelMessage], **settings: Any) -> ModelResponse:
    """One request of a conversation in which `wind` may be called."""
    wind = ToolDefinition(name="wind", parameters_json_schema=WIND_SCHEMA)
    return model_request_sync(
        model(base_url),
        messages,
        model_settings=ModelSettings(temperature=0, **settings),
        model_request_parameters=ModelRequestParameters(function_tools=[wind]),
    )


def a_tool_s_answer_goes_back(base_url: str) -> None:
    asked: list[ModelMessage] = [ModelRequest.user_text_prompt(QUESTION)]
    called = request(base_url, asked, tool_choice="required", max_tokens=150)
    assert called.finish_reason == "tool_call"
    calls = [part for part in called.parts if isinstance(part, ToolCallPart)]
    assert len({call.tool_call_id for call in calls}) == len(calls) >= 1
    for call in calls:
        check_wind(call.args_as_dict())
    returns = [
        ToolReturnPart(tool_name="wind", content="west", tool_call_id=call.tool_call_id)
        for call in calls
    ]
    history = [*asked, called, ModelRequest(parts=returns)]
    answer = request(base_url, history, tool_choice="none", max_tokens=12)
    assert answer.text
    assert answer.finish_reason in {"stop", "length"}


def a_history_is_continued(base_url: str) -> None:
    first = agent(base_url, output_type=ToolOutput(Wind)).run_sync(QUESTION)
    second = agent(base_url, max_tokens=12).run_sync(
        "And then?", message_history=first.all_messages()
    )
    assert second.output
    assert second.usage.input_tokens > 20


def a_bad_request_is_the_client_s_error(base_url: str) -> None:
    asked = Agent(model(base_url), model_settings=ModelSettings(temperature=-1))
    error = raised(ModelHTTPError, lambda: asked.run_sync(QUESTION))
    assert error.status_code == 422
    assert "temperature" in str(error.body)


run(globals())
