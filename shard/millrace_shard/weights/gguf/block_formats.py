"""The formats of tensors in GGUF files: sizes of blocks, and their values as float32.

A block holds `elements` neighbouring values of a row. Values are the same bits that ggml's reference computes: scales
are float16, products and differences are float32, each rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Blocks [n], whose value e is `(codes[e] - zero) * scales[g] + offsets[g]`, where g is `e // group`."""

    codes: Tensor
    """[n, elements] uint8."""
    scales: Tensor
    """[n, groups] float32."""
    offsets: Tensor | None = None
    """[n, groups] float32."""


Split = Callable[[Tensor], BlockCodes]
"""From blocks [n, num_bytes] uint8, contiguous."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format by its name in ggml; decoded values have `dtype`."""

    name: str
    elements: int
    num_bytes: int
    split: Split | None = None
    """None: a block is a number."""
    group: int = 1
    """Elements that share a scale."""
    bits: int = 8
    """Of a code, 4 or 8."""
    zero: int = 0
    """The code of 0 or of the offset."""
    dtype: torch.dtype = torch.float32

    def decode(self, blocks: Tensor) -> Tensor:
        """From blocks [n, num_bytes] uint8, contiguous, to values [n, elements]."""
        if self.split is None:
            return blocks.view(self.dtype)
        parts = self.split(blocks)
        grouped = parts.codes.view(len(blocks), -1, self.group)
        values = (grouped.float() - self.zero) * parts.scales.unsqueeze(-1)
        if parts.offsets is not None:
            values = values + parts.offsets.unsqueeze(-1)
        return values.flatten(1)

    def table(self) -> Tensor:
        return torch.arange(1 << self.bits, dtype=torch.float32) - self.zero


def find_format(number: int, tensor: str) -> BlockFormat:
    """The format of `tensor` by ggml's number. Raises UnsupportedModel with the names of the supported ones."""
    if number not in FORMATS:
        name = OTHER_NAMES.get(number, str(number))
        supported = ", ".join(block_format.name for block_format in FORMATS.values())
        raise UnsupportedModel(
            f"tensor {tensor} has the block type {name}; these are supported: {supported}"
        )
    return FORMATS[number]


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of each block, [n, 1] float32."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[…, k] bytes to […, 2, k] values: the low halves, then the high halves."""
    return torch.stack((packed & 0x0F, packed >> 4), dim=-2)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[n, 4] bytes to [n, 32] values 0 or 16, the lowest bit of each byte first."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)
    return ((bits & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 2:]).flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockCodes:
    codes = _nibbles(blocks[:, 6:]).flatten(1) | _fifth_bits(blocks[:, 2:6])
    return BlockCodes(codes, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockCodes:
    codes = _nibbles(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks[:, 4:8])
    return BlockCodes(codes, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(blocks[:, 2:] ^ 0x80, _half(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [n, 8] of the 8 parts of a Q4_K or Q5_K block.

    Each has 6 bits of the 12 bytes from byte 4: bytes 0 to 3 hold the scales 0 to 3, bytes 4 to 7 the minima 0 to 3.
    The upper two bits of both, and bytes 8 to 11, hold the scales and minima 4 to 7.
    """
    low, mid, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)), dim=1)
    minima = torch.cat((mid & 0x3F, (rest >> 4) | ((mid >> 2) & 0x30)), dim=1)
    return scales.float() * _half(blocks, 0), minima.float() * _half(blocks, 2)


def _q4_k(blocks: Tensor) -> BlockCodes:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    return BlockCodes(codes, scales, -minima)


def _q5_k(blocks: Tensor) -> BlockCodes:
    scales, minima = _k_scales(blocks)
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    bits = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1)
    return BlockCodes((codes | ((bits & 1) << 4)).flatten(1), scales, -minima)


def _q6_k(blocks: Tensor) -> BlockCodes:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks, 208)
    return BlockCodes((low | (high << 4)).flatten(1), scales)


FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2, dtype=torch.float16),
    30: BlockFormat("BF16", 1, 2, dtype=torch.bfloat16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0, group=32, bits=4, zero=8),
    3: BlockFormat("Q4_1", 32, 20, _q4_1, group=32, bits=4),
    6: BlockFormat("Q5_0", 32, 22, _q5_0, group=32, zero=16),
    7: BlockFormat("Q5_1", 32, 24, _q5_1, group=32),
    8: BlockFormat("Q8_0", 32, 34, _q8_0, group=32, zero=128),
    12: BlockFormat("Q4_K", 256, 144, _q4_k, group=32, bits=4),
    13: BlockFormat("Q5_K", 256, 176, _q5_k, group=32),
    14: BlockFormat("Q6_K", 256, 210, _q6_k, group=16, zero=32),
}
"""By the numbers of ggml."""
OTHER_NAMES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""Names of formats that are not supported."""
