"""`prompt_logprobs` in vLLM's form."""

from __future__ import annotations

import math
from typing import Any

import pytest

from millrace_router.api.openai.render import prompt_logprobs_json
from millrace_router.request.events import PromptLogprobs
from millrace_testing.router.edge import echo, limits_with, serving, word_tokenizer

WIDE = limits_with(max_input_tokens=100, max_total_tokens=200)
TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello world a"}]},
    "/v1/completions": {"prompt": "hello world a"},
}


def test_the_token_and_the_likeliest_have_their_ranks() -> None:
    nan = math.nan
    prompt = PromptLogprobs(
        (2, 3, 6), (nan, -0.5, -math.inf), [0, 0, 3, 6, 2, 3], [nan, nan, -0.5, -1.5, -0.25, -2.5]
    )
    tokenizer = word_tokenizer()
    found = prompt_logprobs_json(prompt, 2, tokenizer)
    tokenizer.close()
    assert found == [
        None,
        {
            "3": {"logprob": -0.5, "rank": 1, "decoded_token": " world"},
            "6": {"logprob": -1.5, "rank": 2, "decoded_token": " a"},
        },
        {
            "6": {"logprob": -9999.0, "rank": None, "decoded_token": " a"},
            "2": {"logprob": -0.25, "rank": 1, "decoded_token": " hello"},
            "3": {"logprob": -2.5, "rank": 2, "decoded_token": " world"},
        },
    ]


@pytest.mark.parametrize("route", BODIES)
async def test_answers_have_them_if_requested(route: str) -> None:
    async with serving(echo, limits=WIDE, template=TEMPLATE) as edge:
        body = {**BODIES[route], "max_tokens": 1}
        _, plain, _ = await edge.post(route, body)
        assert "prompt_logprobs" not in str(plain)
        _, answer, _ = await edge.post(route, {**body, "prompt_logprobs": 0})
        held = answer.get("prompt_logprobs", answer["choices"][0].get("prompt_logprobs"))
        assert held[0] is None
        assert [{id_: one["logprob"] for id_, one in each.items()} for each in held[1:]] == [
            {"3": -1.0},
            {"6": -1.0},
        ]
        request = edge.batcher.requests[-1]
        assert (request.prefill_logprobs, request.prompt_top_n_tokens) == (True, 0)
        for wrong in ({"prompt_logprobs": 6}, {"prompt_logprobs": -1}):
            assert (await edge.post(route, body | wrong))[0] == 422
        status, text, _ = await edge.post(route, body | {"prompt_logprobs": 1, "stream": True})
        assert (status, "`prompt_logprobs`" in str(text)) == (422, True)
