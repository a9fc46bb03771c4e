"""`pydantic-ai`'s agent over chats and over responses."""

from __future__ import annotations

from typing import Any

import mill
from cases import run
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from scripts import FLOUR


def conversation(base_url: str, kind: Any, name: str) -> None:
    provider = OpenAIProvider(base_url=f"{base_url}/v1", api_key="-")
    model = kind("tgi", provider=provider)
    agent = Agent(model, instructions="You run a mill.", tools=[mill.wind, mill.grind])
    told = agent.run_sync(f"script:{name} Grind rye.")
    assert told.output == f"{name}: {FLOUR}"
    assert told.usage.requests == 3
    thoughts = [
        part.content
        for message in told.all_messages()
        for part in message.parts
        if part.part_kind == "thinking"
    ]
    assert thoughts == [f"{name}: the wind first."], thoughts
    mill.check_calls()


def chats(base_url: str) -> None:
    conversation(base_url, OpenAIChatModel, "pydantic_ai")


def responses(base_url: str) -> None:
    conversation(base_url, OpenAIResponsesModel, "pydantic_ai_responses")


run(globals())
