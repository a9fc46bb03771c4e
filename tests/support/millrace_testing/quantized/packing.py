"""Codes into words, by arithmetic on wide integers."""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output at each nibble of a word, from the low bits on."""


def into_words(codes: Tensor, bits: int) -> Tensor:
    """int32 words [rows, ceil(n * bits / 32)] of codes [rows, n], the first in the low bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.view(len(codes), -1, per_word) << shifts).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def into_awq_words(codes: Tensor) -> Tensor:
    """int32 words [rows, n / 8] of 4-bit codes [rows, n] in AWQ's order."""
    ordered = codes.view(len(codes), -1, 8)[..., AWQ_ORDER].flatten(1)
    return into_words(ordered, 4)


def into_bytes(codes: Tensor, *, high_first: bool = False) -> Tensor:
    """Bytes [rows, n / 2] of 4-bit codes [rows, n]."""
    first, second = codes[:, 0::2].long(), codes[:, 1::2].long()
    low, high = (second, first) if high_first else (first, second)
    return (low | (high << 4)).to(torch.uint8)
