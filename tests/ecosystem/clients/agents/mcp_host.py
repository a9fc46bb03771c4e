"""A host of an MCP server: the agent lists the server's tools and calls them there."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio
from cases import run
from openai import AsyncOpenAI
from scripts import FLOUR

set_tracing_disabled(disabled=True)
SERVER = Path(__file__).with_name("mcp_server.py")


def the_server_s_tools_are_called_in_turns(base_url: str) -> None:
    async def conversation() -> tuple[str, list[object]]:
        client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="-", max_retries=0)
        command = {"command": sys.executable, "args": [str(SERVER)]}
        async with MCPServerStdio(params=command) as server:
            model = OpenAIResponsesModel("tgi", client)
            miller = Agent(name="miller", model=model, mcp_servers=[server])
            told = await Runner.run(miller, "script:mcp Grind rye.")
            outputs = [item for item in told.new_items if item.type == "tool_call_output_item"]
            return told.final_output, [item.output for item in outputs]

    final, outputs = asyncio.run(conversation())
    assert final == f"mcp: {FLOUR}"
    assert "strong at the river" in str(outputs[0])
    assert "2 sacks ground" in str(outputs[1])


run(globals())
