"""The soft watermark of Kirchenbauer et al. 2023 (arXiv 2301.10226).

The previous token determines which ids are green, and the scores of green ids are raised. TGI takes the green ids from
a random permutation, which differs between kinds of devices. Here a hash of the two ids determines whether an id is
green. The hash is the same on every device and in every batch, and a detector needs no model:

    green(previous, id) = mix(mix(id) ^ mix(15485863 * previous mod 2**32)) >> 8 < gamma * 2**24

`mix` is the finaliser of MurmurHash3 on 32 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PRIME = 15485863
HASH_BITS = 24
_WORD = 1 << 32


@dataclass(frozen=True, slots=True)
class Watermark:
    """The share of green ids, `gamma`, and the value added to their scores, `delta`; the defaults are TGI's."""

    gamma: float = 0.5
    """From 0 to 1: the probability that an id is green."""
    delta: float = 2.0

    def apply(self, scores: Tensor, previous: Tensor) -> Tensor:
        """Raise the green ids of `scores` [n, V] float32; `previous` [n] int64 are the previous tokens."""
        # -1 where an id is green, 0 elsewhere.
        signs = (_top_bits(previous, scores.shape[1]) - self._limit) >> 31
        return signs.to(torch.float32).mul_(-self.delta).add_(scores)

    def green(self, previous: Tensor, vocab_size: int) -> Tensor:
        """Whether each id is green after each of `previous` [n] int64: [n, vocab_size] bool."""
        return _top_bits(previous, vocab_size) < self._limit

    @property
    def _limit(self) -> int:
        return math.ceil(self.gamma * (1 << HASH_BITS))


def _top_bits(previous: Tensor, vocab_size: int) -> Tensor:
    """The top HASH_BITS bits of the hash of each id, [n, vocab_size] int32."""
    ids = torch.arange(vocab_size, dtype=torch.int32, device=previous.device)
    keys = _wrapped(previous * PRIME)
    hashes = _mix(_mix(ids)[None, :] ^ _mix(keys)[:, None])
    return (hashes >> (32 - HASH_BITS)) & ((1 << HASH_BITS) - 1)


def top_bits(values: Tensor) -> Tensor:
    """The top HASH_BITS bits of the hash of each of `values` [n] int64: [n] int32."""
    return (_mix(_wrapped(values)) >> (32 - HASH_BITS)) & ((1 << HASH_BITS) - 1)


def _wrapped(values: Tensor) -> Tensor:
    half = _WORD >> 1
    return (((values + half) & (_WORD - 1)) - half).to(torch.int32)


def _mix(values: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32, whose bits are read as unsigned; products wrap."""
    values = values ^ ((values >> 16) & 0xFFFF)
    values = values.mul_(0x85EBCA6B - _WORD)
    values ^= (values >> 13) & 0x7FFFF
    values = values.mul_(0xC2B2AE35 - _WORD)
    values ^= (values >> 16) & 0xFFFF
    return values
