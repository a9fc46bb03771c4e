"""What the model of the agents' tests says, turn by turn, by the name that a user's message has as `script:NAME`."""

from __future__ import annotations

import json


def call(name: str, **arguments: object) -> str:
    """A call as Qwen and Hermes write it."""
    inside = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inside}\n</tool_call>"


def thought(text: str) -> str:
    """A thought before an answer."""
    return f"<think>\n{text}\n</think>\n\n"


def edit(before: str, after: str) -> str:
    """A change of `mill.txt` as aider asks for it."""
    return f"mill.txt\n```\n<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE\n```\n"


def wind_and_grind(name: str) -> list[str]:
    """A thought and a call, another call, and the end."""
    return [
        f"{thought(f'{name}: the wind first.')}{call('wind', place='river')}",
        f"{name}: now the grain. {call('grind', grain='rye', sacks=2)}",
        f"{name}: two sacks of rye are flour.",
    ]


CODE = 'const made = await tools.exec_command({cmd: "echo wheat > grain.txt; ls"});\ntext(made);\n'
SCRIPTS: dict[str, list[str]] = {
    "codex": [
        thought("I write the file first.")
        + call("exec_command", cmd='echo "rye" > mill.txt; ls', yield_time_ms=1000),
        call("exec_command", cmd="cat mill.txt"),
        "The mill grinds rye.",
    ],
    "codex_custom": [
        call("functions__exec", input=CODE),
        "Once more.\n" + call("functions__exec", input='text("sacks: " + 6 * 7);'),
        "The grain is wheat.",
    ],
    "aider": [
        f"I change the grain.\n\n{edit('rye', 'oats')}",
        f"The test wants wheat.\n\n{edit('oats', 'wheat')}",
    ],
    "anthropic": wind_and_grind("anthropic"),
    "langgraph": wind_and_grind("langgraph"),
    "langgraph_responses": wind_and_grind("langgraph_responses"),
    "mcp": wind_and_grind("mcp"),
    "openai_agents": wind_and_grind("openai_agents"),
    "openai_agents_stored": wind_and_grind("openai_agents_stored"),
    "openai_agents_streamed": wind_and_grind("openai_agents_streamed"),
    "openai_agents_chat": wind_and_grind("openai_agents_chat"),
    "openai_agents_custom": [
        f"I send a note. {call('note', input='rye: 2' + chr(10) + 'oats: 10' + chr(10))}",
        "The note is sent.",
    ],
    "pydantic_ai": wind_and_grind("pydantic_ai"),
    "pydantic_ai_responses": wind_and_grind("pydantic_ai_responses"),
}
FLOUR = "two sacks of rye are flour."
"""The end of every conversation of `wind_and_grind`."""
