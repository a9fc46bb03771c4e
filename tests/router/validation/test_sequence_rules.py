"""Samplers and rules that clients of vLLM and llama.cpp ask for: what becomes of them, on a real socket."""

from __future__ import annotations

from typing import Any

import pytest

from millrace_proto.sampling import NO_RULES, Dry, Sampling
from millrace_testing.router.edge import Edge, echo, limits_with, serving
from millrace_testing.text.texts import tokenizer

WIDE = limits_with(max_input_tokens=100, max_total_tokens=200, vocab_size=300)
BYTES = tokenizer("byte_level")
ROUTE = "/v1/completions"


async def sampling_of(edge: Edge, **fields: Any) -> Sampling:
    body = {"prompt": "hello", "max_tokens": 1, **fields}
    status, answer, _ = await edge.post(ROUTE, body)
    assert status == 200, answer
    return edge.batcher.requests[-1].sampling


def served() -> Any:
    return serving(echo, limits=WIDE, tokenizer=BYTES)


async def test_samplers_arrive() -> None:
    async with served() as edge:
        sampling = await sampling_of(edge, top_n_sigma=1.5, xtc_probability=0.5)
        assert (sampling.top_n_sigma, sampling.xtc_probability) == (1.5, 0.5)
        assert sampling.xtc_threshold == pytest.approx(0.1)
        sampling = await sampling_of(edge, xtc_probability=1, xtc_threshold=0.25, top_n_sigma=-1)
        assert (sampling.top_n_sigma, sampling.xtc_threshold) == (0, 0.25)
        greedy = await sampling_of(edge, top_n_sigma=1.5, xtc_probability=0.5, temperature=0)
        assert not greedy.samples
        assert (await sampling_of(edge)).rules == NO_RULES


async def test_bad_words_are_tokens_alone_and_after_a_blank() -> None:
    async with served() as edge:
        rules = (await sampling_of(edge, bad_words=["hello", " hello"])).rules
    assert rules.bad_words == (tuple(BYTES.encode("hello")), tuple(BYTES.encode(" hello")))


async def test_dry_has_the_defaults_of_llama_cpp() -> None:
    with_line_break = {id_ for id_ in range(BYTES.vocab_size) if "\n" in BYTES.token_text(id_)}
    async with served() as edge:
        dry = (await sampling_of(edge, dry_multiplier=0.75)).rules.dry
        assert dry is not None
        assert (dry.multiplier, dry.base, dry.allowed_length, dry.window) == (0.75, 1.75, 2, 0)
        assert with_line_break < set(dry.breakers)
        given = await sampling_of(
            edge,
            dry_multiplier=0.5,
            dry_base=2,
            dry_allowed_length=3,
            dry_penalty_last_n=64,
            dry_sequence_breakers=["\n"],
        )
        breakers = tuple(sorted(with_line_break))
        expected = Dry(multiplier=0.5, base=2, allowed_length=3, window=64, breakers=breakers)
        assert given.rules.dry == expected
        for off in ({"dry_base": 2}, {"dry_multiplier": 1, "dry_penalty_last_n": 0}):
            assert (await sampling_of(edge, **off)).rules == NO_RULES


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_token_ids", [300]),
        ("bad_words", [" "]),
        ("bad_words", ["a"] * 65),
        ("bad_words", ["a" * 257]),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -1),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["a"] * 17),
        ("dry_base", -1),
    ],
)
async def test_values_without_a_meaning_are_refused_by_name(name: str, value: object) -> None:
    async with served() as edge:
        body = {"prompt": "hello", "max_tokens": 1, "dry_multiplier": 1, name: value}
        status, answer, _ = await edge.post(ROUTE, body)
    assert status == 422
    assert f"`{name}`" in str(answer)
