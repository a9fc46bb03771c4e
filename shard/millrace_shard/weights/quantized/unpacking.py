"""Codes from packed words, and the numbers that codes stand for."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The positive numbers of e2m1; the fourth bit of a code is the sign."""
FLOAT8 = torch.float8_e4m3fn


def nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """The codes [rows, 2 * n] uint8 of bytes [rows, n], the low bits first unless `high_first`."""
    pair = (packed & 0x0F, packed >> 4)
    return torch.stack(pair[::-1] if high_first else pair, dim=-1).flatten(-2)


def codes_of_words(words: Tensor, bits: int) -> Tensor:
    """The codes [rows, n * 32 / bits] uint8 of int32 words [rows, n], from the low bits on."""
    packed = words.contiguous().view(torch.uint8)
    return nibbles(packed) if bits == 4 else packed


def integers(bits: int) -> Tensor:
    """The table of codes that are a number plus half of their range."""
    return torch.arange(1 << bits, dtype=torch.float32) - (1 << (bits - 1))


def signed_bytes() -> Tensor:
    """The table of codes that are the bits of an int8."""
    return torch.arange(256, dtype=torch.uint8).view(torch.int8).float()


def float8_values() -> Tensor:
    """The table of e4m3fn, which has a NaN for 127 and 255."""
    return torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()


def float4_values() -> Tensor:
    positive = torch.tensor(FLOAT4)
    return torch.cat((positive, -positive))


def powers_of_two(exponents: Tensor) -> Tensor:
    """2 ** (e - 127) of uint8 exponents e, float32; 255 is NaN."""
    powers = torch.exp2(exponents.double() - 127).float()
    return torch.where(exponents == 255, torch.nan, powers)


def word_span(start: int, end: int, per_word: int) -> tuple[int, int]:
    """The words that hold the codes from `start` to `end`."""
    return start // per_word, -(-end // per_word)
