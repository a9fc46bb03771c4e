"""Every form in which the `openai` package may offer tools and choose among them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import openai
from cases import QUESTION, TOOLS, WIND_SCHEMA, raised, run, tool
from openai.types.chat import ChatCompletion

OPTIONS: dict[str, Any] = {
    "model": "tgi",
    "messages": QUESTION,
    "temperature": 0,
    "max_tokens": 150,
}


def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)


def ask(base_url: str, **more: Any) -> ChatCompletion:
    """The answer, validated; the package itself takes whatever comes."""
    create = client(base_url).chat.completions.with_raw_response.create
    return ChatCompletion.model_validate_json(create(**{**OPTIONS, **more}).text)


def a_tool_without_parameters_is_called_with_none(base_url: str) -> None:
    bare = {"type": "function", "function": {"name": "stop_the_wheel"}}
    answer = ask(base_url, tools=[bare], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "stop_the_wheel"
    assert json.loads(call.function.arguments) == {}


def only_allowed_tools_are_called(base_url: str) -> None:
    for name in ("wind", "grind"):
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": name}}]}
        answer = ask(
            base_url,
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
            parallel_tool_calls=False,
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == name


def what_cannot_be_called_is_refused(base_url: str) -> None:
    wrong = tool("wind", {"type": "no such type"})
    refused: tuple[dict[str, Any], ...] = (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "missing"}}},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"tools": [wrong], "tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [{"type": "custom", "custom": {"name": "wind"}}]},
        {"functions": [{"name": "wind", "parameters": WIND_SCHEMA}]},
        {"function_call": {"name": "wind"}},
    )
    for more in refused:
        for stream in (False, True):
            create = client(base_url).chat.completions.create
            error = raised(openai.APIStatusError, partial(create, **OPTIONS, **more, stream=stream))
            assert error.status_code in {400, 422}, (more, error.status_code)
            assert error.body["message"], more


run(
    [
        a_tool_without_parameters_is_called_with_none,
        only_allowed_tools_are_called,
        what_cannot_be_called_is_refused,
    ]
)
