"""The requests that lm-eval's remote tokenizer sends to a server."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_testing.router.edge import limits_with, serving


async def test_special_tokens_and_the_template_are_reported() -> None:
    async with serving(template="{{ messages }}", limits=limits_with(max_total_tokens=24)) as edge:
        edge.services.template.special_tokens["eos_token"] = "</s>"
        async with edge.client.get(edge.url + "/tokenizer_info") as response:
            answer = await response.json()
    assert answer == {
        "bos_token": None,
        "eos_token": "</s>",
        "unk_token": None,
        "pad_token": None,
        "chat_template": "{{ messages }}",
        "model_max_length": 24,
    }


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hello wörld", "add_special_tokens": False}, [2, 4]),
        ({"prompt": "hello", "model": "m", "add_special_tokens": None}, [2]),
        ({"prompt": ""}, []),
    ],
    ids=["text", "null", "empty"],
)
async def test_prompts_are_tokenized_in_the_shape_of_vllm(
    body: dict[str, Any], tokens: list[int]
) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post("/tokenize", body)
    assert (status, answer) == (
        200,
        {"count": len(tokens), "max_model_len": 16, "tokens": tokens},
    )


async def test_inputs_are_still_tokenized_in_the_shape_of_tgi() -> None:
    async with serving() as edge:
        for body in ({"inputs": "a b"}, {"inputs": "a b", "prompt": "x"}):
            _, answer, _ = await edge.post("/tokenize", body)
            assert [token["id"] for token in answer] == [6, 7]


@pytest.mark.parametrize("ids", [[2, 4], [], [2, 10**6, 1]], ids=["some", "none", "unknown"])
async def test_token_ids_become_text(ids: list[int]) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post("/detokenize", {"tokens": ids})
        expected = edge.services.tokenizer.decode(ids, skip_special_tokens=False)
    assert (status, answer) == (200, {"prompt": expected})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {}),
    ],
)
async def test_bodies_of_another_shape_are_refused(path: str, body: dict[str, Any]) -> None:
    async with serving() as edge:
        status, answer, _ = await edge.post(path, body)
    assert (status, answer["error_type"]) == (422, "validation")


async def test_the_tokenizer_routes_need_the_key() -> None:
    async with serving(api_key="secret") as edge:
        async with edge.client.get(edge.url + "/tokenizer_info") as response:
            assert response.status == 401
        assert (await edge.post("/detokenize", {"tokens": [2]}))[0] == 401
