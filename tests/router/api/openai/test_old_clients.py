"""Streams of chats for TGI's own old clients, which are known by what they send."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace_router.api.openai.request import OLD_CLIENTS_FIELDS
from millrace_testing.router.chat import URL
from millrace_testing.router.edge import Edge, limits_with, serving
from millrace_testing.text.texts import Generations, tokenizer

BYTES = tokenizer("byte_level")
LIMITS = limits_with(max_input_tokens=1000, max_total_tokens=2000, vocab_size=500)
TEMPLATE = "<tool_call>{% for turn in messages %}{{ turn.content }} {% endfor %}bot"
TOOL = {"type": "function", "function": {"name": "wind", "parameters": {}}}
CALL = '<tool_call>\n{"name": "wind", "arguments": {"place": "sea"}}\n</tool_call>'
SENT: dict[str, Any] = dict.fromkeys(OLD_CLIENTS_FIELDS) | {
    "model": "tgi",
    "messages": [{"role": "user", "content": "hello", "name": None, "tool_calls": None}],
    "max_tokens": 200,
    "stream": True,
}


def served(text: str, **options: Any) -> Any:
    script = Generations([*BYTES.encode(text), 0], tokenizer=BYTES)
    usual = {"limits": LIMITS, "template": TEMPLATE, "tokenizer": BYTES}
    return serving(script, **usual | options)


async def data_of(edge: Edge, body: dict[str, Any]) -> list[str]:
    async with edge.client.post(edge.url + URL, json=body) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    return [one.removeprefix("data: ") for one in text.removesuffix("\n\n").split("\n\n")]


async def test_each_delta_has_a_role_and_a_call_or_null_and_all_is_json() -> None:
    async with served("Hi there") as edge:
        chunks = [json.loads(one) for one in await data_of(edge, SENT)]
    choices = [chunk["choices"][0] for chunk in chunks]
    for choice in choices:
        assert choice["delta"].keys() == {"role", "content", "tool_calls"}
        assert (choice["delta"]["role"], choice["delta"]["tool_calls"]) == ("assistant", None)
    assert "".join(choice["delta"]["content"] for choice in choices) == "Hi there"
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]


async def test_a_call_is_an_object() -> None:
    async with served(CALL) as edge:
        sent = {**SENT, "tools": [TOOL], "tool_choice": "auto"}
        chunks = [json.loads(one) for one in await data_of(edge, sent)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"] for delta in deltas if delta["tool_calls"] is not None]
    assert all(call.keys() == {"index", "id", "type", "function"} for call in calls)
    assert all(call["function"].keys() == {"name", "arguments"} for call in calls)
    assert calls[0]["function"]["name"] == "wind"
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"place": "sea"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("without", ["repetition_penalty", "tool_choice", "n"])
async def test_others_who_send_less_are_not_taken_for_them(without: str) -> None:
    async with served("Hi") as edge:
        *chunks, end = await data_of(edge, {k: v for k, v in SENT.items() if k != without})
    assert end == "[DONE]"
    assert set(json.loads(chunks[-1])["choices"][0]["delta"]) <= {"content"}


async def test_another_model_is_not_theirs() -> None:
    async with served("Hi") as edge:
        assert (await data_of(edge, {**SENT, "model": "org/tiny"}))[-1] == "[DONE]"
