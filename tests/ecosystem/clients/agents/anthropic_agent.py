"""`anthropic`'s tool runner, with what coding agents send: thoughts, cache marks, server tools, beta headers."""

from __future__ import annotations

import anthropic
import mill
from anthropic import beta_tool
from cases import run
from scripts import FLOUR

EPHEMERAL = {"type": "ephemeral"}


def tools_are_called_in_turns(base_url: str) -> None:
    client = anthropic.Anthropic(base_url=base_url, api_key="-", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model="claude",
        max_tokens=200,
        system=[{"type": "text", "text": "You run a mill.", "cache_control": EPHEMERAL}],
        tools=[
            beta_tool(mill.wind),
            beta_tool(mill.grind),
            {"type": "web_search_20250305", "name": "web_search"},
            {"type": "bash_20250124", "name": "bash"},
        ],
        thinking={"type": "adaptive"},
        metadata={"user_id": "miller"},
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        messages=[{"role": "user", "content": "script:anthropic Grind rye."}],
    )
    told = list(runner)
    assert [message.stop_reason for message in told] == ["tool_use", "tool_use", "end_turn"]
    assert told[0].content[0].type == "thinking"
    assert told[0].content[0].signature
    assert told[-1].content[-1].text == f"anthropic: {FLOUR}"
    mill.check_calls()


def tokens_are_counted(base_url: str) -> None:
    client = anthropic.Anthropic(base_url=base_url, api_key="-", max_retries=0)
    asked = [{"role": "user", "content": "script:anthropic Grind rye."}]
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    counted = client.messages.count_tokens(model="claude", messages=asked, tools=tools)
    alone = client.messages.count_tokens(model="claude", messages=asked)
    assert counted.input_tokens == alone.input_tokens > 0


run(globals())
