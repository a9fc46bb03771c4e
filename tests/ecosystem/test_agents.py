"""Agents of others hold conversations with a server whose model says what `scripts` has, and with a real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from aiohttp import web
from bench.harness.server import serving
from tests.ecosystem import prepare
from tests.ecosystem.agents.coding import CODING_AGENTS, NUM_COMMANDS, NotInstalled, Started
from tests.ecosystem.agents.conversations import conversations
from tests.ecosystem.agents.server import REQUESTS, proxy, scripted_server

pytestmark = pytest.mark.ecosystem

LEAST_CACHED = 0.95
"""Of a prompt's tokens, from the second turn on."""


@dataclass(frozen=True, slots=True)
class Scripted:
    """A launcher with the scripted model, and the folder of its files."""

    url: str
    folder: Path

    def requests(self) -> list[dict[str, Any]]:
        """The request log."""
        file = self.folder / REQUESTS
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["fields"] for line in lines]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("agents")
    with scripted_server(folder) as running:
        yield Scripted(running.url, folder)


def hold(scripted: Scripted, name: str) -> list[dict[str, Any]]:
    """The requests of a conversation; skips where the agent is not installed."""
    before = len(scripted.requests())
    folder = scripted.folder / name
    folder.mkdir()
    try:
        conversations()[name](scripted.url, folder)
    except NotInstalled as error:
        pytest.skip(str(error))
    return scripted.requests()[before:]


@pytest.mark.parametrize("name", [name for name in conversations() if not name.endswith("_task")])
def test_an_agent_completes_its_conversation(scripted: Scripted, name: str) -> None:
    hold(scripted, name)


@pytest.mark.parametrize("name", CODING_AGENTS)
def test_a_coding_agent_completes_a_task_of_ten_turns(scripted: Scripted, name: str) -> None:
    sent = hold(scripted, f"{name}_task")
    assert {each["status"] for each in sent} == {200}, sent
    turns = [each for each in sent if each.get("prompt_tokens", 0) > 1000]
    assert len(turns) >= NUM_COMMANDS + 2
    shares = [each["cached_tokens"] / each["prompt_tokens"] for each in turns]
    assert min(shares[1 : NUM_COMMANDS + 2]) >= LEAST_CACHED, shares
    last = turns[NUM_COMMANDS + 1]
    later = sent[sent.index(last) + 1 :]
    num_turns = 2 if CODING_AGENTS[name].next == "rest" else 1
    assert len(later) > num_turns, "no summary was asked for"
    assert later[-1]["prompt_tokens"] < last["prompt_tokens"], "the history was not compacted"


NUM_CALLS = 3
"""Turns that call a tool; the next one calls none, and ends the task."""
READER: dict[str, Any] = {
    "opencode.json": {
        "provider": {
            "millrace": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "@URL/v1", "apiKey": "-", "timeout": False},
                "models": {"tgi": {"limit": {"context": 32768, "output": 2048}}},
            }
        },
        "tools": {"*": False, "read": True},
        "agent": {"title": {"disable": True}, "build": {"prompt": "You read files."}},
    }
}
"""opencode with one tool, which changes nothing, whatever a small model calls it with; its own prompt is long."""
UNSHARED = 64
"""Most tokens at the end of a prompt that the next turn's has not: the start of an answer, and a part of a block."""
FORCED = {"temperature": 0, "max_tokens": 200}
"""Limits of a turn: a forced call takes some 40 tokens."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A real model as users get it: no flag changes what it does."""
    if not prepare.REAL_MODEL.exists():
        pytest.skip("Qwen2.5-Coder is missing: make test-all SUITE=ecosystem fetches it")
    folder = tmp_path_factory.mktemp("real")
    flags = [f"--log-requests={folder / REQUESTS}"]
    with serving(prepare.REAL_MODEL, log=folder / "launcher.log", flags=flags) as running:
        yield Scripted(running.url, folder)


def test_forced_calls_of_a_real_model_match_their_schema(real: Scripted) -> None:
    bodies: list[Any] = []

    def forced(_: web.Request, body: bytes) -> bytes:
        asked = json.loads(body)
        is_over = len(calls_in(asked)) >= NUM_CALLS
        named = {"type": "function", "function": {"name": "read"}}
        bodies.append(asked | FORCED | {"tool_choice": "none" if is_over else named})
        return json.dumps(bodies[-1]).encode()

    async def ask() -> None:
        async with proxy(real.url, forced) as url:
            try:
                opencode = Started("opencode", url, real.folder / "opencode")
            except NotInstalled as error:
                pytest.skip(str(error))
            opencode.write(READER)
            (opencode.work / "mill.txt").write_text("rye\n")
            await asyncio.to_thread(opencode.ask, "What is in mill.txt?")

    # It may take longer than the limit of an asynchronous test.
    asyncio.run(ask())
    (tool,) = bodies[-1]["tools"]
    assert len(calls_in(bodies[-1])) == NUM_CALLS
    for call in calls_in(bodies[-1]):
        jsonschema.validate(json.loads(call["arguments"]), tool["function"]["parameters"])
    sent = real.requests()
    assert {each["status"] for each in sent} == {200}, sent
    assert len(sent) == NUM_CALLS + 1
    for one, other in pairwise(sent):
        assert other["cached_tokens"] >= one["prompt_tokens"] - UNSHARED, sent


def calls_in(asked: Any) -> list[Any]:
    """The calls in the history of a chat."""
    turns = asked["messages"]
    return [call["function"] for turn in turns for call in turn.get("tool_calls") or ()]
