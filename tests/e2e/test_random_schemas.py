"""A model of random weights under random schemas: what it ends is valid, and what is cut off can still become so."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from bench.structured_output.schemas import problem

from millrace_testing.engines.grammars import Words, schema, walk
from millrace_testing.engines.random_schemas import bodies
from millrace_testing.launcher.e2e import launch
from millrace_testing.models.tiny_models import save_with_tokenizer

NUM_CLIENTS = 32
NUM_SCHEMAS = int(os.environ.get("RANDOM_SCHEMAS", "300"))
BYTES = Words((bytes([byte]) for byte in range(256)), size=259)
"""None of the model's tokens but its bytes: what is a beginning for these is one however it is split."""
REFUSAL = "Input validation error: grammar is not valid: "


def completed(described: object, beginning: str) -> str | None:
    """A text that begins so, as it may, its rest chosen at random of what may follow; None where that does not end."""
    matcher = BYTES.matcher(schema(json.dumps(described)))
    # The last character may have lacked bytes.
    so_far = beginning.rstrip("\ufffd").encode()
    assert matcher.consume_all(BYTES.split(so_far)), (described, beginning)
    rest = walk(matcher, BYTES, random.Random(beginning), most=400)
    return None if rest is None else (so_far + rest).decode()


def outcome(described: object, status: int, answer: dict[str, Any]) -> str:
    """The outcome of a request; fails if the answer is wrong."""
    if status == 422:
        assert answer["error"].removeprefix(REFUSAL) not in {"", answer["error"]}, answer
        return "refused"
    assert status == 200, (described, answer)
    text, reason = answer["generated_text"], answer["details"]["finish_reason"]
    if reason == "eos_token":
        assert problem(text, described) is None, (described, text)
        return "complete"
    assert reason == "length"
    whole = completed(described, text)
    if whole is None:
        return "cut off"
    assert problem(whole, described) is None, (described, text, whole)
    return "cut off and completed"


async def outcomes_of(url: str) -> Counter[str]:
    """Counts of the outcomes of a request with each schema; several requests run at a time."""
    left, outcomes = bodies(NUM_SCHEMAS, "random weights"), Counter[str]()

    async def client(session: aiohttp.ClientSession) -> None:
        for described, body in left:
            async with session.post("/generate", json=body) as response:
                answer = await response.json()
            outcomes[outcome(described, response.status, answer)] += 1

    async with aiohttp.ClientSession(base_url=url) as session, asyncio.TaskGroup() as clients:
        for _ in range(NUM_CLIENTS):
            clients.create_task(client(session))
    return outcomes


@pytest.mark.long
def test_random_weights_generate_nothing_that_a_schema_forbids(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path, "llama")
    with launch(f"--model-id={tmp_path}") as server:
        outcomes = asyncio.run(outcomes_of(server.url))
    sys.stdout.write(f"\n{outcomes}\n")
    assert outcomes["complete"] > NUM_SCHEMAS / 3
    assert outcomes["refused"] < NUM_SCHEMAS / 3
    assert outcomes["cut off"] < NUM_SCHEMAS / 20
