"""The records of quarantined requests, the refusal of equal requests, and the route that shows the records."""

from __future__ import annotations

import time
from array import array
from dataclasses import fields, replace
from hashlib import sha256
from typing import Any

import orjson
import pytest

from millrace_proto.sampling import Sampling, SequenceRules
from millrace_router.recovery.quarantine import REFUSED_SECONDS, Quarantine
from millrace_router.request.request import (
    Grammar,
    GrammarKind,
    Pooling,
    SchedulingParameters,
    ValidRequest,
)
from millrace_testing.adapters.fake_adapters import version_of
from millrace_testing.router.edge import serving

SAMPLED = Sampling(do_sample=True, temperature=0.7, seed=7, bias=((70009, 1.0),))
POISON = ValidRequest(
    input_ids=(70001, 70002, 70003),
    max_new_tokens=20,
    sampling=SAMPLED,
    stop_sequences=("secret",),
    grammar=Grammar(GrammarKind.REGEX, "secret"),
)
OTHER_VALUES: dict[str, Any] = {
    "pooling": Pooling(),
    "input_ids": (70001, 70002, 70004),
    "max_new_tokens": 21,
    "sampling": replace(SAMPLED, top_k=3),
    "stop_sequences": ("secrets",),
    "ignore_eos": True,
    "stop_token_ids": (7,),
    "cache_salt": ("secret",),
    "min_new_tokens": 2,
    "top_n_tokens": 1,
    "prefill_logprobs": True,
    "prompt_top_n_tokens": 1,
    "grammar": Grammar(GrammarKind.REGEX, "secrets"),
    "adapter": version_of("secrets", number=2),
}


OTHER_SAMPLING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 3,
    "top_p": 0.5,
    "typical_p": 0.5,
    "do_sample": False,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "openai_frequency_penalty": 0.5,
    "min_p": 0.5,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.5,
    "rules": SequenceRules(allowed_ids=(70009,)),
    "watermark": True,
    "bias": ((70009, 2.0),),
}


def holding(request: ValidRequest = POISON, *, num_generated: int = 0) -> Quarantine:
    quarantine = Quarantine()
    quarantine.add(request, num_generated=num_generated, reason="lost")
    return quarantine


def reseeded(request: ValidRequest, seed: int) -> ValidRequest:
    return replace(request, sampling=replace(request.sampling, seed=seed))


def test_no_request_is_refused_at_first() -> None:
    assert not Quarantine().refuses(POISON)


def test_the_same_request_is_refused_on_whatever_terms() -> None:
    again = replace(
        POISON, scheduling=SchedulingParameters(priority=3, tenant="b", max_queue_seconds=1.0)
    )
    assert holding().refuses(again)


@pytest.mark.parametrize(
    "name", [field.name for field in fields(ValidRequest) if field.name != "scheduling"]
)
def test_a_request_that_differs_in_anything_is_not(name: str) -> None:
    assert not holding().refuses(replace(POISON, **{name: OTHER_VALUES[name]}))


def test_the_version_of_an_adapter_counts_and_its_name_does_not() -> None:
    version = version_of("a")
    quarantine = holding(replace(POISON, adapter=version))
    assert quarantine.refuses(replace(POISON, adapter=replace(version, name="another")))
    assert not quarantine.refuses(replace(POISON, adapter=version_of("a", number=1)))
    assert not quarantine.refuses(POISON)


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling) if field.name != "seed"])
def test_a_request_that_is_sampled_in_another_way_is_not(name: str) -> None:
    sampling = replace(SAMPLED, **{name: OTHER_SAMPLING[name]})
    assert not holding().refuses(replace(POISON, sampling=sampling))


@pytest.mark.parametrize(
    ("num_generated", "sampling", "refused"),
    [(0, SAMPLED, True), (1, SAMPLED, False), (1, Sampling(seed=7), True)],
    ids=["before its first token", "after a sampled token", "after a greedy token"],
)
def test_another_seed_helps_only_if_it_could_choose_other_tokens(
    num_generated: int, sampling: Sampling, *, refused: bool
) -> None:
    poison = replace(POISON, sampling=sampling)
    quarantine = holding(poison, num_generated=num_generated)
    assert quarantine.refuses(poison)
    assert quarantine.refuses(reseeded(poison, 8)) is refused


def test_seed_zero_is_a_seed() -> None:
    quarantine = holding(reseeded(POISON, 0), num_generated=1)
    assert quarantine.refuses(reseeded(POISON, 0))
    assert not quarantine.refuses(POISON)


def test_after_ten_minutes_it_may_try_again() -> None:
    now = 1000.0
    quarantine = Quarantine(clock=lambda: now)
    quarantine.add(POISON, num_generated=0, reason="lost")
    now += REFUSED_SECONDS - 1
    assert quarantine.refuses(POISON)
    now += 1
    assert not quarantine.refuses(POISON)
    assert len(quarantine.to_json()) == 1


def test_the_oldest_go() -> None:
    quarantine = Quarantine(capacity=2)
    requests = [replace(POISON, max_new_tokens=count) for count in (1, 2, 3)]
    for request in requests:
        quarantine.add(request, num_generated=0, reason="lost")
    assert [quarantine.refuses(request) for request in requests] == [False, True, True]
    kept: Any = quarantine.to_json()
    assert [record["parameters"]["max_new_tokens"] for record in kept] == [3, 2]


async def test_the_route_shows_no_text_and_no_ids() -> None:
    async with serving() as edge:
        status, body, response = await edge.get("/v1/quarantine")
        assert (status, orjson.loads(body)) == (200, {"quarantined": []})
        assert response.content_type == "application/json"
        before = time.time()
        edge.batcher.quarantine.add(POISON, num_generated=5, reason="hung")
        _, body, _ = await edge.get("/v1/quarantine")
    (record,) = orjson.loads(body)["quarantined"]
    assert before <= record.pop("when") <= time.time()
    assert "secret" not in str(record)
    assert "7000" not in str(record)
    assert record == {
        "reason": "hung",
        "prompt_sha256": sha256(array("I", POISON.input_ids)).hexdigest(),
        "prompt_tokens": 3,
        "generated_tokens": 5,
        "parameters": {
            "temperature": 0.7,
            "top_k": 0,
            "top_p": 1.0,
            "typical_p": 1.0,
            "do_sample": True,
            "seed": 7,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "openai_frequency_penalty": 0.0,
            "min_p": 0.0,
            "top_n_sigma": 0.0,
            "xtc_probability": 0.0,
            "xtc_threshold": 0.0,
            "rules": False,
            "watermark": False,
            "bias": 1,
            "adapter_sha256": None,
            "grammar": "regex",
            "max_new_tokens": 20,
            "min_new_tokens": 0,
            "stop_sequences": 1,
            "ignore_eos": False,
            "stop_token_ids": 0,
            "top_n_tokens": 0,
            "prefill_logprobs": False,
            "prompt_top_n_tokens": 0,
        },
    }


async def test_the_key_opens_the_route() -> None:
    async with serving(api_key="secret") as edge:
        headers = {"authorization": "Bearer secret"}
        assert (await edge.get("/v1/quarantine"))[:2] == (401, b"")
        assert (await edge.get("/v1/quarantine", headers=headers))[0] == 200
