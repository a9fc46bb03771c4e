"""Random schemas against a running server: every complete answer must validate."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp

from bench.harness.command_line import say
from bench.parts.client import RequestsFailed
from bench.parts.fixture import Fixture
from bench.parts.part import Case, Figures, Part
from bench.structured_output.schemas import Schemas, problem

NUM_CLIENTS, MAX_NEW_TOKENS = 32, 200
NUM_SCHEMAS = 10_000
SHOWN = 5
CASES = (Case("random schemas", amount=NUM_SCHEMAS),)


class Invalid(RequestsFailed):
    """An answer violates its schema, or a request failed."""


def bodies(num: int, seed: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Schemas, and requests that sample under them at high temperatures."""
    schemas, rng = Schemas(seed), random.Random(seed)
    for number in range(num):
        schema = schemas.schema()
        parameters = {
            "max_new_tokens": MAX_NEW_TOKENS,
            "details": True,
            "do_sample": True,
            "temperature": rng.choice((0.7, 1.0, 3.0)),
            "seed": number,
            "grammar": {"type": "json_schema", "value": {"name": "random", "schema": schema}},
        }
        yield schema, {"inputs": f"Number {number}:", "parameters": parameters}


async def ask(session: aiohttp.ClientSession, schema: dict[str, Any], body: dict[str, Any]) -> str:
    """The outcome of one request: `valid`, `refused`, `cut off`, or the violation."""
    async with session.post("/generate", json=body) as response:
        answer = await response.json()
    if response.status == 422:
        return "refused"
    if response.status != 200:
        return f"status {response.status}: {answer}"
    if answer["details"]["finish_reason"] == "length":
        return "cut off"
    wrong = problem(answer["generated_text"], schema)
    return (
        "valid" if wrong is None else f"{wrong}\n{answer['generated_text']}\n{json.dumps(schema)}"
    )


async def ask_all(url: str, num: int, seed: str) -> Counter[str]:
    """Ask for every schema once, with a number of clients."""
    left, outcomes = bodies(num, seed), Counter[str]()
    timeout = aiohttp.ClientTimeout(total=300)

    async def client(session: aiohttp.ClientSession) -> None:
        for schema, body in left:
            outcomes[await ask(session, schema, body)] += 1
            if outcomes.total() % 500 == 0:
                say(f"{outcomes.total()} schemas: {dict(outcomes.most_common(3))}")

    async with aiohttp.ClientSession(base_url=url, timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(NUM_CLIENTS)))
    return outcomes


def run(fixture: Fixture, case: Case) -> Figures:
    num = fixture.sized(int(case.amount), 200)
    with fixture.serving(*case.flags) as server:
        outcomes = asyncio.run(ask_all(server.url, num, fixture.seed("validity")))
    expected = {name: outcomes.pop(name, 0) for name in ("valid", "cut off", "refused")}
    if outcomes:
        some = "\n".join(list(outcomes)[:SHOWN])
        raise Invalid(f"{outcomes.total()} of {num} answers are wrong, such as:\n{some}")
    return {
        "schemas": float(num),
        **{name: float(count) for name, count in expected.items()},
        "invalid": 0.0,
    }


PART = Part(
    name="validity",
    title="Random schemas",
    method=(
        "A random schema of all supported keywords for each request; sampled at temperatures of 0.7"
        f" to 3 until the text ends or has {MAX_NEW_TOKENS} tokens. `jsonschema` validates each complete text. The"
        " server refuses schemas that allow nothing, and combinations that it cannot enforce."
    ),
    cases=CASES,
    run=run,
)
