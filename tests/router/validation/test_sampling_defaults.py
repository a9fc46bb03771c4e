"""Defaults of a model: what of generation_config.json counts, and which requests get it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millrace_router.validation.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from millrace_testing.router.edge import echo, limits_with, serving

WIDE = limits_with(max_input_tokens=100, max_total_tokens=200)
TEMPLATE = "{% for turn in messages %}{{ turn.content }} {% endfor %}"
QWEN: dict[str, Any] = json.loads(
    '{"bos_token_id": 1, "do_sample": true, "repetition_penalty": 1.5, "temperature": 0.5,'
    ' "top_p": 0.75, "top_k": 20, "transformers_version": "4.51.0"}'
)
"""In the form of a published model's file."""
TURNS = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 7},
}
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def serving_with(config: dict[str, Any]) -> Any:
    defaults = SamplingDefaults.of(config)
    return serving(echo, limits=WIDE, template=TEMPLATE, defaults=defaults)


async def sampled(config: dict[str, Any], route: str, **fields: Any) -> dict[str, Any]:
    """The resolved parameters of a request."""
    async with serving_with(config) as edge:
        status, answer, _ = await edge.post(route, {**BODIES[route], **fields})
        assert status == 200, answer
        sampling = edge.batcher.requests[-1].sampling
        return {name: getattr(sampling, name) for name in (*NEUTRAL, "samples")}


@pytest.mark.parametrize("route", BODIES)
async def test_what_is_left_out_is_the_models(route: str) -> None:
    expected = {
        "temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.0,
        "repetition_penalty": 1.5, "samples": True,
    }  # fmt: skip
    assert await sampled(QWEN, route) == expected
    assert await sampled(QWEN, route, temperature=0.25) == expected | {"temperature": 0.25}
    # A neutral value was not left out.
    assert await sampled(QWEN, route, top_p=1, temperature=1) == expected | {
        "temperature": 1.0,
        "top_p": 1.0,
    }
    assert await sampled({}, route) == NEUTRAL | {"samples": True}


@pytest.mark.parametrize("route", BODIES)
async def test_greedy_requests_stay_greedy(route: str) -> None:
    expected = NEUTRAL | {"samples": False, "repetition_penalty": 1.5}
    assert await sampled(QWEN, route, temperature=0) == expected


@pytest.mark.parametrize("route", BODIES)
async def test_a_model_may_be_greedy_by_default(route: str) -> None:
    config = QWEN | {"temperature": 0.0}
    expected = NEUTRAL | {"samples": False, "repetition_penalty": 1.5}
    assert await sampled(config, route) == expected
    assert (await sampled(config, route, temperature=0.5))["samples"]


async def test_native_routes_keep_tgis_defaults() -> None:
    async with serving_with(QWEN) as edge:
        await edge.post("/generate", {"inputs": "hello", "parameters": {}})
        assert not edge.batcher.requests[-1].sampling.samples
        await edge.post("/generate", {"inputs": "hello"})
        assert edge.batcher.requests[-1].sampling.temperature == 1.0


async def test_new_tokens_are_bounded_where_a_request_has_no_bound() -> None:
    async with serving_with({"max_new_tokens": 5}) as edge:
        for fields, expected in (
            ({}, 5),
            ({"max_tokens": 7}, 7),
            ({"max_completion_tokens": 8}, 8),
        ):
            body = BODIES["/v1/chat/completions"] | fields
            await edge.post("/v1/chat/completions", body)
            assert edge.batcher.requests[-1].max_new_tokens == expected
        await edge.post("/generate", {"inputs": "hello"})
        assert edge.batcher.requests[-1].max_new_tokens == 199
    async with serving_with({"max_new_tokens": 5000}) as edge:
        await edge.post("/v1/completions", BODIES["/v1/completions"])
        assert edge.batcher.requests[-1].max_new_tokens == 199


async def test_a_response_repeats_them() -> None:
    async with serving_with(QWEN) as edge:
        _, answer, _ = await edge.post("/v1/responses", BODIES["/v1/responses"])
        assert (answer["temperature"], answer["top_p"]) == (0.5, 0.75)


def test_values_that_restrict_nothing_are_none() -> None:
    config = {"temperature": 1, "top_k": 0, "top_p": 1.0, "min_p": 0, "repetition_penalty": 1.0}
    assert SamplingDefaults.of(config) == NO_DEFAULTS
    assert SamplingDefaults.of({"top_k": -1, "temperature": None}) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1), ("temperature", "1"), ("temperature", True), ("top_k", -2),
        ("top_k", 1.5), ("top_p", 0), ("top_p", 1.5), ("min_p", 2), ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)  # fmt: skip
def test_values_without_a_meaning_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        SamplingDefaults.of({name: value})
