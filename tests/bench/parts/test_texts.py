"""Prompts of an exact number of tokens, by the tokenizers themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.harness.checkpoints import build_tokenizer
from bench.parts.texts import Texts
from tokenizers import Tokenizer

from millrace_launcher import __file__ as launcher_file

DEMO = Path(launcher_file).parents[2] / "demo" / "model" / "tokenizer.json"


@pytest.fixture(scope="module", params=["bench", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "demo":
        return Tokenizer.from_file(str(DEMO))
    return build_tokenizer(32768)


@pytest.mark.parametrize("num_tokens", [2, 3, 64, 1000])
def test_a_prompt_has_exactly_so_many_tokens(tokenizer: Tokenizer, num_tokens: int) -> None:
    prompt = Texts(tokenizer).prompt(num_tokens, seed="a")
    assert len(tokenizer.encode(prompt).ids) == num_tokens


def test_prompts_that_begin_alike_share_exactly_that(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    system = texts.prompt(50, seed="system")
    first, second = (
        tokenizer.encode(texts.prompt(80, seed=seed, after=system)).ids for seed in "ab"
    )
    assert len(first) == len(second) == 80
    assert first[:50] == second[:50] == tokenizer.encode(system).ids
    assert first[50:] != second[50:]


def test_counting_agrees_with_the_tokenizer(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    prompts = [texts.prompt(length, seed=str(length)) for length in (5, 17)]
    assert texts.count(prompts) == sum(len(tokenizer.encode(p).ids) for p in prompts) == 22


def test_a_seed_names_a_prompt(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    assert texts.prompt(30, seed="a") == texts.prompt(30, seed="a")
    assert texts.prompt(30, seed="a")[:20] != texts.prompt(30, seed="b")[:20]


def test_no_prompt_is_shorter_than_its_beginning(tokenizer: Tokenizer) -> None:
    texts = Texts(tokenizer)
    with pytest.raises(ValueError, match="before the 3 begin"):
        texts.prompt(3, seed="a", after=texts.prompt(10, seed="b"))
