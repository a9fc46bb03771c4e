"""Prompts of an exact number of tokens, for the tokenizer that `checkpoints` ships."""

from __future__ import annotations

import random
import string

NUM_LETTERS = 3
"""Every lower-case word of this length is one token of the benchmark tokenizer."""


def words(num_tokens: int, *, seed: str) -> list[str]:
    """Random words, one token each; the same seed gives the same words."""
    generator = random.Random(seed)
    letters = string.ascii_lowercase
    return ["".join(generator.choices(letters, k=NUM_LETTERS)) for _ in range(num_tokens)]


def prompt(num_tokens: int, *, seed: str) -> str:
    """Text of `num_tokens` tokens; distinct seeds share no useful prefix, so no cache helps."""
    return " ".join(words(num_tokens, seed=seed))
