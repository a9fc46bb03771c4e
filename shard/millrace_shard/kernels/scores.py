"""Operators on rows of scores: masks of grammars, the likeliest tokens, and what a device offers for sampling.

Rows are aligned: torch's softmax on CUDA adds up a row in an order that depends on the place of its first element
within 16 bytes. If V is not a multiple of 4, that place depends on the row's number, and so would the bits of the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from millrace_shard.arrays import Ints
from millrace_shard.device import transfers
from millrace_shard.device.transfers import upload
from millrace_shard.kernels.build import operators_loaded

ALIGNMENT = 4
"""Elements float32 in 16 bytes."""


def aligned(scores: Tensor) -> Tensor:
    """`scores` [n, V] float32, padded to [n, W] by minus infinity if V is not a multiple of 4; on CPU, as they are."""
    padding = -scores.shape[1] % ALIGNMENT
    if not padding or transfers.is_synchronous(scores.device):
        return scores
    return torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))


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


BYTE_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMasks:
    """Masks of G of the R rows of a step."""

    rows: Ints
    """[G], distinct indexes among the R rows."""
    bits: Tensor
    """[G, W] int32 on the device, contiguous: bit i of word j allows id 32 j + i; ids from 32 W on are forbidden."""


class MaskTable:
    """Applies masks, by a table of the values that each byte of a mask adds to eight scores: 0 or minus infinity."""

    def __init__(self, device: torch.device) -> None:
        byte = torch.arange(1 << BYTE_BITS, device=device)[:, None]
        is_allowed = (byte >> torch.arange(BYTE_BITS, device=device)) & 1
        self._added = torch.where(is_allowed > 0, 0.0, float("-inf"))

    def forbid(self, scores: Tensor, masks: RowMasks, *, most_elements: int) -> None:
        """Set the scores [R, V] float32, contiguous, of forbidden ids to minus infinity, in place.

        NaN stays NaN, and plus infinity becomes NaN, so a failed row stays failed. Without compiled operators, at most
        `most_elements` scores, but at least one row, are processed at a time.
        """
        if scores.device.type == "cpu" and operators_loaded():
            torch.ops.millrace.forbid(scores, upload(masks.rows, scores.device), masks.bits)
            return
        size = scores.shape[1]
        height = max(1, most_elements // size)
        for start in range(0, len(masks.rows), height):
            index = upload(masks.rows[start : start + height], scores.device)
            # The lowest byte of a word comes first: all supported devices are little-endian.
            octets = masks.bits[start : start + height].view(torch.uint8)
            added = self._added.index_select(0, octets.flatten().to(torch.int32))
            added = added.view(len(octets), -1)[:, :size]
            if missing := size - added.shape[1]:
                added = torch.nn.functional.pad(added, (0, missing), value=float("-inf"))
            scores.index_add_(0, index, added)


class Best(NamedTuple):
    """The most likely tokens of R rows."""

    ids: Tensor
    """[R] int64, the first among equals."""
    logprobs: Tensor
    """[R] float32; not finite where a logit is NaN or plus infinity."""
    failed: Tensor
    """[R] bool, where `logprobs` is not finite."""


def choose_greedy(logits: Tensor) -> Best:
    """The most likely tokens of `logits` [R, V] float32. A row's bits depend only on the row."""
    if logits.device.type == "cpu" and operators_loaded():
        return Best(*torch.ops.millrace.greedy(logits.contiguous()))
    best = logits.max(-1)
    # `logsumexp` splits a single long row over threads; `log_softmax` sums every row in one thread.
    logprobs = aligned(logits).log_softmax(-1).gather(1, best.indices[:, None]).squeeze(1)
    return Best(best.indices, logprobs, ~logprobs.isfinite())
