"""Thoughts on a real server: budgets and grammars behind them, over kills, with drafts, on two ranks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace_testing.launcher.e2e import END_SECONDS, Server, launch, sse_events
from millrace_testing.models.models import save_tiny
from millrace_testing.router.streams import added_up
from millrace_testing.text.thoughts import tagged_file

TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
)
BUDGET = 120
SCHEMA = {
    "type": "object",
    "properties": {"part": {"enum": ["router", "shard"]}, "runs": {"type": "boolean"}},
    "required": ["part", "runs"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
PLAIN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is a shard?"}],
    "max_tokens": BUDGET + 50,
    "thinking_token_budget": BUDGET,
    "seed": 1,
}
BODIES = [
    PLAIN,
    {**PLAIN, "response_format": FORMAT},
    {**PLAIN, "response_format": FORMAT, "temperature": 0},
    {**PLAIN, "response_format": FORMAT, "seed": 2, "thinking_token_budget": BUDGET // 2},
]
Message = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinker")
    size = tagged_file(folder)
    ends: dict[str, Any] = {"eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}
    save_tiny(folder, "llama", vocab_size=size, max_position_embeddings=1024, **ends)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with launch(f"--model-id={model}", "--dtype=float32", "--deterministic=on") as running:
        yield running


async def whole(server: Server, body: dict[str, Any]) -> Message:
    """The message of an answer in one piece, whose tokens are counted."""
    async with httpx.AsyncClient(timeout=END_SECONDS) as client:
        response = await client.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    # The tag that closes the thought is counted, too.
    spent = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert spent == body["thinking_token_budget"] + 1
    (choice,) = answer["choices"]
    message: Message = choice["message"]
    if "response_format" in body:
        # Random weights may spend all their room on blanks.
        assert message["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            assert json.loads(message["content"])["part"] in {"router", "shard"}
    return message


async def streamed(server: Server, body: dict[str, Any], chunks: list[Any]) -> Message:
    """The message that a stream adds up to; its chunks are added to `chunks` as they come."""
    first = len(chunks)
    async with (
        httpx.AsyncClient(timeout=END_SECONDS) as client,
        client.stream(
            "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}
        ) as stream,
    ):
        async for line in stream.aiter_lines():
            chunks += sse_events(iter([line, ""]))
    message: Message = added_up(chunks[first:])[0]["message"]
    return message


@pytest.mark.long
async def test_a_shard_killed_within_a_thought_changes_nothing(server: Server) -> None:
    expected = [await whole(server, body) for body in BODIES]
    assert len({message["reasoning"] for message in expected}) > 2
    chunks: list[list[Any]] = []

    async def send() -> list[Message]:
        chunks[:] = [[] for _ in BODIES]
        return await asyncio.gather(
            *(streamed(server, body, told) for body, told in zip(BODIES, chunks, strict=True))
        )

    def is_time() -> bool:
        return bool(chunks) and len(chunks[0]) > BUDGET // 8

    task, shard = await server.caught(send, is_time=is_time, num_running=len(BODIES))
    assert not any(
        chunk["choices"][0]["delta"].get("content") for told in chunks for chunk in told
    ), "the thoughts are over"
    shard.kill()
    assert await task == expected


@pytest.mark.long
async def test_drafts_change_no_thought(server: Server, model: Path) -> None:
    expected = [await whole(server, body) for body in BODIES]
    flags = ("--dtype=float32", "--deterministic=on", "--speculate=3")
    with launch(f"--model-id={model}", *flags) as other:
        assert [await whole(other, body) for body in BODIES] == expected
