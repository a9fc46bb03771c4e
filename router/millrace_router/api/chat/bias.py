"""OpenAI's `logit_bias`: a JSON object from token ids, as text, to numbers that are added to their scores."""

from __future__ import annotations

from collections.abc import Mapping

from millrace_router.errors import ValidationError
from millrace_router.request.float32 import rounded

MAX_BIASES = 300
"""OpenAI's limit, too."""
MAX_BIAS = 100.0
MAX_DIGITS = 10
"""Digits of a token id, which is a 32-bit number."""


def biases_from(given: Mapping[str, object]) -> tuple[tuple[int, float], ...]:
    """Read (token id, bias) pairs, each id once; whether the model has the tokens is checked later.

    Raises:
        ValidationError: there are too many pairs, a key is not a token id, or a bias is not a number from -100 to 100.

    """
    if len(given) > MAX_BIASES:
        raise ValidationError(
            f"`logit_bias` must have at most {MAX_BIASES} tokens. Given: {len(given)}"
        )
    return tuple((_id_from(key), _bias_from(key, value)) for key, value in given.items())


def _id_from(key: str) -> int:
    # int() also accepts "05" and "1_0", with which one id could have two biases.
    if not (key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS) or str(int(key)) != key:
        raise ValidationError(f"`logit_bias` must have token ids for keys. Given: {key[:20]}")
    return int(key)


def _bias_from(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_bias(value):
        raise ValidationError(
            f"`logit_bias` must have numbers from -100 to 100 for values. Token {key} has another"
        )
    return rounded(float(value))


def _is_bias(value: float) -> bool:
    return -MAX_BIAS <= value <= MAX_BIAS
