"""The operators on rows of scores that a device may offer beside those of a decoder."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

SCALE_BITS = 38
"""Probabilities are summed in units of 2**-SCALE_BITS; such a sum times a uniform of 24 bits fits into 63 bits."""


class FindThreshold(Protocol):
    """Finds the smallest key to keep of each row."""

    def __call__(self, keys: Tensor, probabilities: Tensor | None, limit: Tensor, /) -> Tensor:
        """The smallest key of each row such that the keys above it are below the limit, [n, 1] float32.

        `keys` [n, V] float32, where NaN is above all numbers. With `probabilities` [n, V] float32, the row's `limit`
        [n, 1] float32 is a share of their sum, and each is rounded down to a multiple of 2**-SCALE_BITS. Without them
        it is a number of keys, [n, 1] int64, at least 1. Where the limit is not reached, the result keeps all keys.
        """


class SamplingKernels(Protocol):
    """Operators that sort no vocabulary and read no whole sequence. None waits for the device."""

    def find_threshold(
        self, keys: Tensor, probabilities: Tensor | None, limit: Tensor, /
    ) -> Tensor:
        """See FindThreshold."""

    def count_tokens(
        self, counts: Tensor, token_table: Tensor, spans: Tensor, longest: int
    ) -> None:
        """Add the tokens of `spans` [4, m] int64 to `counts` [slots, V] int64.

        `token_table` [slots, length] int32. A column of `spans` has a slot, the first position and the position past
        the last, at most `longest` apart, and the length of the prompt. The low 32 bits count all tokens of an id, and
        the high 32 bits those past the prompt.
        """

    def penalise(
        self, scores: Tensor, counts: Tensor, token_table: Tensor, rows: Tensor, penalties: Tensor
    ) -> None:
        """Change `scores` [R, V] float32, contiguous, in place, with the bits of `penalties.penalise`.

        A column of `rows` [5, n] int64 has a row of `scores`, its slot, the number of tokens that `counts` has of it,
        the number of all its tokens, and the length of the prompt. The tokens past the counted ones are few.
        `penalties` [4, n] float32: repetition, frequency, presence, OpenAI's frequency.
        """
