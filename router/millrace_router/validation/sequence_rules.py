"""Token ids for the rules of a request that clients write as texts; the tokenizer works in another thread."""

from __future__ import annotations

import math
from collections.abc import Iterator

from millrace_proto.sampling import Dry, SequenceRules
from millrace_router.errors import ValidationError
from millrace_router.request.generation_request import DryRequest, GenerationRequest
from millrace_router.text.tokenizer import Tokenizer, TokenizerError

MAX_BAD_WORDS = 64
MAX_WORD_CHARS = 256
MAX_BREAKERS = 16
MAX_DRY_WINDOW = 1 << 20


def has_rules(request: GenerationRequest) -> bool:
    """Return whether the request has any rule."""
    return bool(request.allowed_token_ids or request.bad_words or request.dry)


def rules_of(request: GenerationRequest, tokenizer: Tokenizer, vocab_size: int) -> SequenceRules:
    """Check the rules, and find their tokens; raises ValidationError."""
    highest = max(request.allowed_token_ids, default=0)
    if highest >= vocab_size:
        raise ValidationError(
            f"`allowed_token_ids` contains token id {highest}, but the model knows only {vocab_size}"
        )
    return SequenceRules(
        allowed_ids=tuple(sorted(set(request.allowed_token_ids))),
        bad_words=_bad_words(request.bad_words, tokenizer),
        dry=None if request.dry is None else _dry(request.dry, tokenizer, vocab_size),
    )


def _bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word at the start of a text, and after a blank, each passage once."""
    if len(words) > MAX_BAD_WORDS or max(map(len, words), default=0) > MAX_WORD_CHARS:
        raise ValidationError(
            f"`bad_words` supports up to {MAX_BAD_WORDS} words of at most {MAX_WORD_CHARS} characters"
        )
    return tuple(dict.fromkeys(ids for word in words for ids in _spellings(word, tokenizer)))


def _spellings(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    bare = word.lstrip(" ")
    if not bare:
        raise ValidationError("`bad_words` must not be blank")
    try:
        for text in (bare, f" {bare}"):
            yield tokenizer.encode(text, add_special_tokens=False)
    except TokenizerError as error:
        raise ValidationError(f"tokenizer error {error}") from error


def _dry(asked: DryRequest, tokenizer: Tokenizer, vocab_size: int) -> Dry:
    if not (0 <= asked.multiplier < math.inf and 0 <= asked.base < math.inf):
        raise ValidationError("`dry_multiplier` and `dry_base` must be >= 0.0")
    if len(asked.breakers) > MAX_BREAKERS or not all(asked.breakers):
        raise ValidationError(
            f"`dry_sequence_breakers` supports up to {MAX_BREAKERS} texts, none of them empty"
        )
    return Dry(
        multiplier=asked.multiplier,
        base=asked.base,
        allowed_length=asked.allowed_length,
        window=min(asked.window, MAX_DRY_WINDOW),
        breakers=tokenizer.ids_with(asked.breakers, vocab_size),
    )
