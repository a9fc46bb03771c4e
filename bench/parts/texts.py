"""Prompts of an exact number of tokens for any byte-level tokenizer, the demo model's included."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

NUM_WORDS = 512


class Texts:
    """Draws prompts from words of one token each, space included. ValueError for a tokenizer with too few."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_special = len(tokenizer.encode("").ids)
        """Tokens that the tokenizer adds to every prompt."""
        self.words: list[str] = []
        """Each is one token after a space."""
        for token in sorted(tokenizer.get_vocab()):
            word = token[1:]
            if token[0] == "Ġ" and word.isascii() and word.isalpha() and _is_one(tokenizer, word):
                self.words.append(word)
                if len(self.words) == NUM_WORDS:
                    return
        if len(self.words) < 2:
            raise ValueError("the tokenizer has no words of one token each")

    @classmethod
    def of(cls, model: Path) -> Texts:
        """The texts of a checkpoint's tokenizer."""
        return cls(Tokenizer.from_file(str(model / "tokenizer.json")))

    def prompt(self, num_tokens: int, *, seed: str) -> str:
        """Random text of `num_tokens` tokens, special ones included; distinct seeds share no useful prefix."""
        words = random.Random(seed).choices(self.words, k=num_tokens - self.num_special)
        return "".join(f" {word}" for word in words)


def _is_one(tokenizer: Tokenizer, word: str) -> bool:
    return len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1
