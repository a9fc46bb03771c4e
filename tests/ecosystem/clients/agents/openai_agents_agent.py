"""`openai-agents`: responses and chats, whole, streamed and stored; custom tools; tools of OpenAI's servers beside."""

from __future__ import annotations

import asyncio
from typing import Any

import mill
from agents import (
    Agent,
    CustomTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    WebSearchTool,
    function_tool,
    set_tracing_disabled,
)
from cases import run
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from scripts import FLOUR

set_tracing_disabled(disabled=True)
TOOLS = [function_tool(mill.wind), function_tool(mill.grind, strict_mode=False)]
ENTRY = 'start: line+\nline: WORD ":" " " INT LF\n%import common (WORD, INT, LF)'


def agent(base_url: str, kind: Any = OpenAIResponsesModel, **more: Any) -> Agent[None]:
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)
    settings: dict[str, Any] = {
        "name": "miller",
        "instructions": "You run a mill.",
        "model": kind("tgi", client),
        "tools": TOOLS,
    }
    return Agent(**settings | more)


def functions_are_called_in_turns(base_url: str) -> None:
    settings = ModelSettings(
        reasoning=Reasoning(effort="low", summary="auto"),
        verbosity="low",
        store=False,
        response_include=["reasoning.encrypted_content"],
    )
    miller = agent(base_url, tools=[*TOOLS, WebSearchTool()], model_settings=settings)
    told = Runner.run_sync(miller, "script:openai_agents Grind rye.")
    assert told.final_output == f"openai_agents: {FLOUR}"
    kinds = [item.type for item in told.new_items]
    assert kinds[:3] == ["reasoning_item", "tool_call_item", "tool_call_output_item"], kinds
    assert told.context_wrapper.usage.requests == 3
    mill.check_calls()


def events_tell_the_same(base_url: str) -> None:
    async def streamed() -> tuple[str, list[str]]:
        answer = Runner.run_streamed(agent(base_url), "script:openai_agents_streamed Grind rye.")
        deltas = [
            event.data.delta
            async for event in answer.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return answer.final_output, deltas

    final, deltas = asyncio.run(streamed())
    assert final == f"openai_agents_streamed: {FLOUR}"
    assert "".join(deltas).endswith(final)
    mill.check_calls()


def an_id_stands_for_the_conversation(base_url: str) -> None:
    told = Runner.run_sync(
        agent(base_url), "script:openai_agents_stored Grind rye.", auto_previous_response_id=True
    )
    assert told.final_output == f"openai_agents_stored: {FLOUR}"
    assert told.last_response_id is not None
    mill.check_calls()


def chats_do_the_same(base_url: str) -> None:
    miller = agent(base_url, OpenAIChatCompletionsModel)
    told = Runner.run_sync(miller, "script:openai_agents_chat Grind rye.")
    assert told.final_output == f"openai_agents_chat: {FLOUR}"
    mill.check_calls()


def the_input_of_a_custom_tool_matches_its_grammar(base_url: str) -> None:
    notes = []

    async def send(_: Any, note: str) -> str:
        notes.append(note)
        return "sent"

    tool = CustomTool(
        name="note",
        description="Sends a note.",
        on_invoke_tool=send,
        format={"type": "grammar", "syntax": "lark", "definition": ENTRY},
    )
    told = Runner.run_sync(agent(base_url, tools=[tool]), "script:openai_agents_custom Tell it.")
    assert told.final_output == "The note is sent."
    assert notes == ["rye: 2\noats: 10\n"]


run(globals())
