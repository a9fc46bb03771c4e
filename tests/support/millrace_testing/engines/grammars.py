"""Small vocabularies, languages that can be listed, and walks over whatever masks allow."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from millrace_proto.sequence import Grammar, GrammarKind
from millrace_shard.structured_output.compilation import compiled
from millrace_shard.structured_output.manager import GrammarManager
from millrace_shard.structured_output.matcher import Lexer, Matcher
from millrace_shard.structured_output.vocabulary import Vocabulary

EOS, OTHER_EOS, SPECIAL = 0, 1, 2
ENDINGS = (b'"', b"}", b"]")


def lark(source: str) -> Grammar:
    """A grammar in Lark."""
    return Grammar(GrammarKind.LARK, source)


def regex(source: str) -> Grammar:
    """A regular expression."""
    return Grammar(GrammarKind.REGEX, source)


def schema(source: str) -> Grammar:
    """A JSON Schema."""
    return Grammar(GrammarKind.JSON_SCHEMA, source)


class Words:
    """A vocabulary: two end-of-sequence ids, a special one, these pieces, and ids without text up to `size`."""

    def __init__(
        self, pieces: Iterable[bytes], *, size: int, eos: Sequence[int] = (EOS, OTHER_EOS)
    ) -> None:
        known = [b"</s>", b"<|end|>", b"<|tool|>", *dict.fromkeys(pieces)]
        assert len(known) <= size
        self.tokens = known + [b""] * (size - len(known))
        self.eos = tuple(eos)
        self.vocabulary = Vocabulary.of(self.tokens, special=(0, 1, 2), eos_token_ids=eos)

    def text(self, ids: Iterable[int]) -> bytes:
        """The text of these tokens."""
        return b"".join(self.tokens[id_] for id_ in ids if id_ > SPECIAL)

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of a text."""
        return compiled(grammar, self.vocabulary)[1]

    def split(self, text: bytes, rng: random.Random | None = None) -> list[int]:
        """Tokens of `text`, each one of those that fit: the longest, or any."""
        ids: list[int] = []
        while text:
            fitting = [
                id_
                for id_, token in enumerate(self.tokens)
                if id_ > SPECIAL and token
                if text.startswith(token)
            ]
            assert fitting, f"no token begins {text!r}"
            id_ = rng.choice(fitting) if rng else max(fitting, key=lambda i: len(self.tokens[i]))
            ids.append(id_)
            text = text[len(self.tokens[id_]) :]
        return ids

    def expected(self, language: Iterable[bytes], so_far: bytes) -> set[int]:
        """The tokens that may follow `so_far` in a text of `language`."""
        left = [word[len(so_far) :] for word in language if word.startswith(so_far)]
        allowed = {
            id_
            for id_, token in enumerate(self.tokens)
            if id_ > SPECIAL and token and any(rest.startswith(token) for rest in left)
        }
        return allowed | (set(self.eos) if b"" in left else set())


class Compiler:
    """Compiles in place, where the real one has another process try the grammar out."""

    def __init__(self, words: Words) -> None:
        self.vocabulary = words.vocabulary
        self.num_renewed = 0
        self._words = words

    def matcher(self, grammar: Grammar) -> Matcher:
        """A new one."""
        return self._words.matcher(grammar)

    def renewed(self, grammar: Grammar, _: Lexer) -> Matcher | None:
        """A new one, counted."""
        self.num_renewed += 1
        return self._words.matcher(grammar)


def new_manager(words: Words, *, overlap: bool = True) -> GrammarManager:
    """A manager over `words`."""
    return GrammarManager(Compiler(words), words.vocabulary.size, overlap=overlap)  # type: ignore[arg-type]


def allowed(mask: NDArray[np.int32]) -> set[int]:
    """Ids of a mask [W]."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def mask_of(matcher: Matcher) -> list[int]:
    """Ids that may come next."""
    bits = np.unpackbits(
        np.frombuffer(matcher.inner.compute_bitmask(), dtype=np.uint8), bitorder="little"
    )
    return np.flatnonzero(bits).tolist()


def walk(
    matcher: Matcher, words: Words, rng: random.Random, *, most: int, haste: float = 0.3
) -> bytes | None:
    """Choose among what is allowed until the text ends; None if `most` tokens do not get there.

    With the probability `haste` a token that closes something is taken where one is allowed.
    """
    ids: list[int] = []
    while len(ids) < most:
        choices = mask_of(matcher)
        assert matcher.error() is None, matcher.error()
        closing = [i for i in choices if i in words.eos or words.tokens[i][:1] in ENDINGS]
        id_ = rng.choice(closing if closing and rng.random() < haste else choices)
        assert words.tokens[id_], "an id without text is allowed"
        assert matcher.consume(id_)
        if matcher.has_ended:
            return words.text(ids)
        ids.append(id_)
    return None
