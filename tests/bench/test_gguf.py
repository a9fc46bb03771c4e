"""Prompts for a GGUF file have as many tokens as their level says."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.gguf import LEVELS, WordLevel, check_lengths, single_words
from bench.harness.paths import DEMO
from bench.peers.engines import gguf_model
from tokenizers import Tokenizer

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def test_prompts_are_words_of_one_token_each() -> None:
    words = single_words(TOKENIZER)
    assert len(words) > 100
    levels = [WordLevel.of(level, words) for level in LEVELS]
    check_lengths(levels, TOKENIZER)
    prompts = [prompt for level in levels for prompt in level.prompts()]
    assert len({prompt[:60] for prompt in prompts}) == len(prompts)
    assert list(levels[0].prompts()) == list(levels[0].prompts())


def test_a_word_of_two_tokens_is_noticed() -> None:
    level = WordLevel.of(LEVELS[0], (" zzzqqq",))
    with pytest.raises(ValueError, match=r"a prompt of c=1 16\+128 has \d+ tokens"):
        check_lengths([level], TOKENIZER)


def test_a_gguf_file_is_not_converted(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert gguf_model(file) == file
