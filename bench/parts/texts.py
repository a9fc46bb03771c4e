"""Prompts of an exact number of tokens for any byte-level tokenizer, the demo model's included."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

NUM_WORDS = 512


class Texts:
    """Draws prompts from words of one token each, space included. ValueError for a tokenizer with too few."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_special = len(tokenizer.encode("").ids)
        """Tokens that the tokenizer adds to every prompt."""
        self._words: list[str] = []
        for token in sorted(tokenizer.get_vocab()):
            word = token[1:]
            if token[0] == "Ġ" and word.isascii() and word.isalpha() and _is_one(tokenizer, word):
                self._words.append(word)
                if len(self._words) == NUM_WORDS:
                    return
        if len(self._words) < 2:
            raise ValueError("the tokenizer has no words of one token each")

    @classmethod
    def of(cls, model: Path) -> Texts:
        """The texts of a checkpoint's tokenizer."""
        return cls(Tokenizer.from_file(str(model / "tokenizer.json")))

    def prompt(self, num_tokens: int, *, seed: str, after: str = "") -> str:
        """Random text of `num_tokens` tokens in all, special ones included, that begins with `after`.

        `after` must be a prompt of this object. Distinct seeds share no useful prefix beyond it.
        """
        num_before = self.num_special + len(after.split())
        if num_tokens < num_before:
            raise ValueError(f"{num_before} tokens are there before the {num_tokens} begin")
        words = random.Random(seed).choices(self._words, k=num_tokens - num_before)
        return after + "".join(f" {word}" for word in words)

    def count(self, prompts: Sequence[str]) -> int:
        """Tokens of prompts of this object."""
        return sum(self.num_special + len(prompt.split()) for prompt in prompts)


def _is_one(tokenizer: Tokenizer, word: str) -> bool:
    return len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1
