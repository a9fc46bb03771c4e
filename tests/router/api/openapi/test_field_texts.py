"""Every field of chats and of TGI's generation is described, and its range is the one that the server checks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from millrace_testing.contract.openapi import DOCUMENT
from millrace_testing.router.edge import echo, limits_with, serving

SCHEMAS = DOCUMENT["components"]["schemas"]
WHOLE = ("ChatRequest", "GenerateParameters", "GenerateRequest", "CompatGenerateRequest")
FORM = re.compile(r"[A-Z`].+\. Range: .+\. Default: .+\.", re.DOTALL)
BOUNDS = re.compile(r"Range: (-?[\d.]+) to (-?[\d]+(?:\.\d+)?)(?:;|\. )")
TURN: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("name", WHOLE)
def test_every_field_has_a_sentence_a_range_and_a_default(name: str) -> None:
    fields = SCHEMAS[name]["properties"]
    assert [field for field in fields if not FORM.fullmatch(fields[field]["description"])] == []


def bounded(name: str) -> list[tuple[str, float, float]]:
    """Fields of a schema whose description has a range of numbers."""
    fields = SCHEMAS[name]["properties"]
    matches = [(field, BOUNDS.search(fields[field]["description"])) for field in fields]
    return [
        (field, float(match[1]), float(match[2]))
        for field, match in matches
        if match and field not in {"seed", "logit_bias"}
    ]


async def test_ranges_are_those_that_the_server_checks() -> None:
    async with serving(echo, template="hello", limits=limits_with(max_total_tokens=32)) as edge:

        async def status(path: str, name: str, value: float) -> int:
            given = {name: int(value) if value.is_integer() else value, "seed": 1}
            body = TURN | given if "chat" in path else {"inputs": "a", "parameters": given}
            code: int = (await edge.post(path, body))[0]
            return code

        chat, parameters = bounded("ChatRequest"), bounded("GenerateParameters")
        assert {name for name, *_ in chat} >= {
            "temperature",
            "min_p",
            "priority",
            "presence_penalty",
        }
        assert {name for name, *_ in parameters} >= {"min_p", "priority", "frequency_penalty"}
        for path, fields in (("/v1/chat/completions", chat), ("/generate", parameters)):
            for name, least, most in fields:
                assert await status(path, name, least) == 200, name
                assert await status(path, name, most) == 200, name
                step = 0.5 if name not in {"priority", "top_logprobs"} else 1.0
                assert await status(path, name, least - step) in {400, 422}, name
                assert await status(path, name, most + step) in {400, 422}, name
