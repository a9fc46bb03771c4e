"""The formats of tensors in GGUF files: sizes of blocks, and their values as float32.

A block holds `elements` neighbouring values of a row. Values are the same bits that ggml's reference computes: scales
are float16, products and differences are float32, each rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from millrace_shard.errors import UnsupportedModel
from millrace_shard.kernels.quantized import ScaleUnits


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """Blocks [n], whose value e is `(codes[e] - zero) * scales[g] + offsets[g]`, where g is `e // group`."""

    codes: Tensor
    """[n, elements] uint8."""
    scales: Tensor
    """[n, groups] float32."""
    offsets: Tensor | None = None
    """[n, groups] float32."""
    units: ScaleUnits | None = None
    """[n, 1] of the scales and offsets of a block of UNIT_INPUTS values."""


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
    """The code of 0 or of the offset; formats of 8 bits share it, so that weights of several are one matrix."""
    values: tuple[float, ...] | None = None
    """What the 16 codes stand for; None: the code minus `zero`."""
    dtype: torch.dtype = torch.float32

    @property
    def stored_bits(self) -> float:
        """Bits of a value in the file."""
        return 8 * self.num_bytes / self.elements

    def decode(self, blocks: Tensor) -> Tensor:
        """From blocks [n, num_bytes] uint8, contiguous, to values [n, elements]."""
        if self.split is None:
            return blocks.view(self.dtype)
        parts = self.split(blocks)
        grouped = parts.codes.view(len(blocks), -1, self.group)
        numbers = (
            grouped.float() - self.zero if self.values is None else self.table()[grouped.int()]
        )
        values = numbers * parts.scales.unsqueeze(-1)
        if parts.offsets is not None:
            values = values + parts.offsets.unsqueeze(-1)
        return values.flatten(1)

    def table(self) -> Tensor:
        """float32 [16] or [256], what the codes stand for."""
        if self.values is not None:
            return torch.tensor(self.values, dtype=torch.float32)
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


ZERO = 128
"""The code of 0 in formats whose codes have 8 bits here."""


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
    return BlockCodes(codes.add_(ZERO - 16), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockCodes:
    codes = _nibbles(blocks[:, 8:]).flatten(1) | _fifth_bits(blocks[:, 4:8])
    return BlockCodes(codes.add_(ZERO), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockCodes:
    return BlockCodes(blocks[:, 2:] ^ ZERO, _half(blocks, 0))


def _with_k_scales(codes: Tensor, blocks: Tensor) -> BlockCodes:
    """Codes with the scales and minima [n, 8] of the 8 parts of a Q4_K or Q5_K block.

    Each has 6 bits of the 12 bytes from byte 4: bytes 0 to 3 hold the scales 0 to 3, bytes 4 to 7 the minima 0 to 3.
    The upper two bits of both, and bytes 8 to 11, hold the scales and minima 4 to 7.
    """
    low, mid, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)), dim=1)
    minima = torch.cat((mid & 0x3F, (rest >> 4) | ((mid >> 2) & 0x30)), dim=1)
    units = ScaleUnits(_half(blocks, 0), _half(blocks, 2))
    return BlockCodes(
        codes, scales.float() * units.scales, -(minima.float() * units.offsets), units
    )


def _q4_k(blocks: Tensor) -> BlockCodes:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256)
    return _with_k_scales(codes, blocks)


def _q5_k(blocks: Tensor) -> BlockCodes:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    bits = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(8, 1)
    return _with_k_scales((codes | ((bits & 1) << 4)).flatten(1).add_(ZERO), blocks)


def _q6_k(blocks: Tensor) -> BlockCodes:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3).view(-1, 8, 32)
    unit = _half(blocks, 208)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * unit
    codes = (low | (high << 4)).flatten(1).add_(ZERO - 32)
    return BlockCodes(codes, scales, units=ScaleUnits(unit, torch.zeros_like(unit)))


def _pairs(packed: Tensor) -> Tensor:
    """[…, k] bytes to […, 4, k] values of 2 bits, the lowest first."""
    return (packed.unsqueeze(-2) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)) & 3


def _bits(packed: Tensor) -> Tensor:
    """[…, k] bytes to […, 8 k] values of 1 bit, the lowest of each byte first."""
    return ((packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _words(blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """The little-endian unsigned numbers, as wide as `dtype`, in bytes `start` to `end` of each block, int64."""
    stored = blocks[:, start:end].contiguous().view(dtype).long()
    return stored & ((1 << 8 * dtype.itemsize) - 1)


def _in_units(codes: Tensor, unit: Tensor, counts: Tensor) -> BlockCodes:
    """Codes whose scales are whole `counts` [n, groups] of the `unit` [n, 1] of a block."""
    return BlockCodes(codes, counts.float() * unit, units=ScaleUnits(unit, torch.zeros_like(unit)))


def _q2_k(blocks: Tensor) -> BlockCodes:
    codes = _pairs(blocks[:, 16:80].reshape(-1, 2, 32)).flatten(1)
    scales, units = blocks[:, :16], ScaleUnits(_half(blocks, 80), _half(blocks, 82))
    offsets = -((scales >> 4).float() * units.offsets)
    return BlockCodes(codes, (scales & 0x0F).float() * units.scales, offsets, units)


def _q3_k(blocks: Tensor) -> BlockCodes:
    low = _pairs(blocks[:, 32:96].reshape(-1, 2, 32)).flatten(1)
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    high = ((blocks[:, :32].unsqueeze(1) >> shifts) & 1).flatten(1)
    counts = _nibbles(blocks[:, 96:104]).flatten(1) | (_pairs(blocks[:, 104:108]).flatten(1) << 4)
    return _in_units((low | (high << 2)).add_(8 - 4), _half(blocks, 108), counts.int() - 32)


TRITS = 3
"""Base of the digits in the bytes of TQ1_0, which are fractions of 256."""


def _trits(packed: Tensor, count: int) -> Tensor:
    """[n, k] bytes to [n, count * k] digits 0, 1 or 2: the first of each byte, then the second of each."""
    powers = torch.tensor([TRITS**each for each in range(count)]).view(count, 1)
    fractions = (packed.int().unsqueeze(1) * powers) & 0xFF
    return ((fractions * TRITS) >> 8).to(torch.uint8).flatten(1)


def _tq1_0(blocks: Tensor) -> BlockCodes:
    parts = (_trits(blocks[:, :32], 5), _trits(blocks[:, 32:48], 5), _trits(blocks[:, 48:52], 4))
    return BlockCodes(torch.cat(parts, 1).add_(8 - 1), _half(blocks, 52))


def _tq2_0(blocks: Tensor) -> BlockCodes:
    codes = _pairs(blocks[:, :64].reshape(-1, 2, 32)).flatten(1)
    return BlockCodes(codes.add_(8 - 1), _half(blocks, 64))


def _mxfp4(blocks: Tensor) -> BlockCodes:
    exponents = blocks[:, :1].int()
    # Half of 2^(e - 127), which is subnormal for the least two.
    bits = torch.where(exponents < 2, 0x200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return BlockCodes(_nibbles(blocks[:, 1:]).flatten(1), bits.view(torch.float32))


def _nvfp4(blocks: Tensor) -> BlockCodes:
    # Half of an e4m3, whose sign has no effect; 127 stands for 0, and 255 for 480, which e4m3 has not.
    stored = blocks[:, :4]
    scales = (stored & 0x7F).view(torch.float8_e4m3fn).float() / 2
    scales[stored == 127], scales[stored == 255] = 0.0, 480 / 2
    return BlockCodes(_nibbles(blocks[:, 4:].reshape(-1, 4, 8)).flatten(1), scales)


def _iq4_nl(blocks: Tensor) -> BlockCodes:
    return BlockCodes(_nibbles(blocks[:, 2:]).flatten(1), _half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> BlockCodes:
    low = _nibbles(blocks[:, 4:8].unsqueeze(-1)).flatten(1)
    high = _pairs(blocks[:, 2:4].unsqueeze(-1)).flatten(1)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).flatten(1)
    return _in_units(codes, _half(blocks, 0), (low | (high << 4)).int() - 32)


NEGATIVE = 8
"""The bit of the sign in codes of points of a grid; the others number a value of the grid."""


@cache
def _grid(name: str) -> Tensor:
    """The points of the grid of a format, [points, 4 or 8] codes."""
    # Only these formats need the package, whose import takes a moment.
    from gguf import quants  # noqa: PLC0415

    kind = getattr(quants, name)
    kind.init_grid()
    numbers = {value: code for code, value in enumerate(kind.grid_map)}
    points = kind.grid.reshape(kind.grid_shape)
    codes = [[numbers[value] for value in point] for point in points.tolist()]
    return torch.tensor(codes, dtype=torch.uint8)


@cache
def _even_signs() -> Tensor:
    """The signs of 8 values by their first 7, [128, 8], 1 for a minus: their number is even."""
    signs = _bits(torch.arange(128, dtype=torch.uint8).view(128, 1))
    signs[:, 7] = signs.sum(1) & 1
    return signs


def _on_grid(name: str, points: Tensor, signs: Tensor) -> Tensor:
    """Codes [n, values] of the numbers of points [n, p] with `signs` [n, …] of their values, 1 for a minus."""
    return _grid(name)[points].flatten(1) | (signs.flatten(1) * NEGATIVE)


def _odd(counts: Tensor) -> Tensor:
    return 2 * counts.int() + 1


def _four(numbers: Tensor, width: int) -> Tensor:
    """[n, k] numbers to [n, 4 k]: four of `width` bits each, the lowest first."""
    parts = numbers.unsqueeze(-1) >> torch.arange(0, 4 * width, width)
    return (parts & ((1 << width) - 1)).flatten(1)


def _iq2_xxs(blocks: Tensor) -> BlockCodes:
    pairs = blocks[:, 2:66].reshape(-1, 8, 8)
    rest = _words(pairs.reshape(-1, 8), 4, 8, torch.int32).view(-1, 8)
    signs = _even_signs()[_four(rest, 7)]
    codes = _on_grid("IQ2_XXS", pairs[:, :, :4].flatten(1).long(), signs)
    return _in_units(codes, _half(blocks, 0), _odd(rest >> 28))


def _iq2_xs(blocks: Tensor) -> BlockCodes:
    numbers = _words(blocks, 2, 66, torch.int16)
    codes = _on_grid("IQ2_XS", numbers & 511, _even_signs()[numbers >> 9])
    counts = _odd(_nibbles(blocks[:, 66:].unsqueeze(-1)).flatten(1))
    return _in_units(codes, _half(blocks, 0), counts)


def _iq2_s(blocks: Tensor) -> BlockCodes:
    upper = _four(blocks[:, 66:74].long(), 2)
    codes = _on_grid("IQ2_S", blocks[:, 2:34].long() | (upper << 8), _bits(blocks[:, 34:66]))
    counts = _odd(_nibbles(blocks[:, 74:].unsqueeze(-1)).flatten(1))
    return _in_units(codes, _half(blocks, 0), counts)


def _iq3_xxs(blocks: Tensor) -> BlockCodes:
    rest = _words(blocks, 66, 98, torch.int32)
    codes = _on_grid("IQ3_XXS", blocks[:, 2:66].long(), _even_signs()[_four(rest, 7)])
    return _in_units(codes, _half(blocks, 0), _odd(rest >> 28))


def _iq3_s(blocks: Tensor) -> BlockCodes:
    points = blocks[:, 2:66].long() | (_bits(blocks[:, 66:74]).long() << 8)
    codes = _on_grid("IQ3_S", points, _bits(blocks[:, 74:106]))
    counts = _odd(_nibbles(blocks[:, 106:].unsqueeze(-1)).flatten(1))
    return _in_units(codes, _half(blocks, 0), counts)


def _iq1_s(blocks: Tensor) -> BlockCodes:
    rest = _words(blocks, 34, 50, torch.int16)
    points = blocks[:, 2:34].long() | (_four(rest, 3) << 8)
    below = (rest >> 15).repeat_interleave(32, 1).to(torch.uint8)
    return _in_units(_on_grid("IQ1_S", points, below), _half(blocks, 0), _odd((rest >> 12) & 7))


def _iq1_m(blocks: Tensor) -> BlockCodes:
    scales = _words(blocks, 48, 56, torch.int16)
    # The upper four bits of each number are a quarter of a float16.
    bits = ((scales >> 12) << torch.arange(0, 16, 4)).sum(1, keepdim=True)
    unit = bits.to(torch.int32).to(torch.int16).view(torch.float16).float()
    rest = _nibbles(blocks[:, 32:48].unsqueeze(-1)).flatten(1)
    points = blocks[:, :32].long() | ((rest & 7).long() << 8)
    below = (rest >> 3).repeat_interleave(8, 1)
    return _in_units(_on_grid("IQ1_M", points, below), unit, _odd(_four(scales & 0xFFF, 3)))


def _both_signs(*values: float) -> tuple[float, ...]:
    """The table of codes with the bit NEGATIVE for these values of a grid."""
    padded = (*values, *[0.0] * (NEGATIVE - len(values)))
    return (*padded, *(-value for value in padded))


DOUBLED_E2M1 = (
    0.0,
    1.0,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    0.0,
    -1.0,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
    -8.0,
    -12.0,
)
IQ4 = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
IQ3 = (4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0)
IQ2 = _both_signs(8 / 8, 25 / 8, 43 / 8)
"""ggml has eighths of the scales, and these numbers times 8; products are the same bits."""
DELTA = 0.125
IQ1 = (
    *(each + DELTA for each in (-1, 0, 1)),
    *[0.0] * 5,
    *(each - DELTA for each in (-1, 0, 1)),
    *[0.0] * 5,
)

FORMATS = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2, dtype=torch.float16),
    30: BlockFormat("BF16", 1, 2, dtype=torch.bfloat16),
    2: BlockFormat("Q4_0", 32, 18, _q4_0, group=32, bits=4, zero=8),
    3: BlockFormat("Q4_1", 32, 20, _q4_1, group=32, bits=4),
    6: BlockFormat("Q5_0", 32, 22, _q5_0, group=32, zero=ZERO),
    7: BlockFormat("Q5_1", 32, 24, _q5_1, group=32, zero=ZERO),
    8: BlockFormat("Q8_0", 32, 34, _q8_0, group=32, zero=ZERO),
    10: BlockFormat("Q2_K", 256, 84, _q2_k, group=16, bits=4),
    11: BlockFormat("Q3_K", 256, 110, _q3_k, group=16, bits=4, zero=8),
    12: BlockFormat("Q4_K", 256, 144, _q4_k, group=32, bits=4),
    13: BlockFormat("Q5_K", 256, 176, _q5_k, group=32, zero=ZERO),
    14: BlockFormat("Q6_K", 256, 210, _q6_k, group=16, zero=ZERO),
    16: BlockFormat("IQ2_XXS", 256, 66, _iq2_xxs, group=32, bits=4, values=IQ2),
    17: BlockFormat("IQ2_XS", 256, 74, _iq2_xs, group=16, bits=4, values=IQ2),
    18: BlockFormat(
        "IQ3_XXS", 256, 98, _iq3_xxs, group=32, bits=4, values=_both_signs(*(v / 4 for v in IQ3))
    ),
    19: BlockFormat("IQ1_S", 256, 50, _iq1_s, group=32, bits=4, values=IQ1),
    20: BlockFormat("IQ4_NL", 32, 18, _iq4_nl, group=32, bits=4, values=IQ4),
    21: BlockFormat(
        "IQ3_S", 256, 110, _iq3_s, group=32, bits=4, values=_both_signs(*range(1, 16, 2))
    ),
    22: BlockFormat("IQ2_S", 256, 82, _iq2_s, group=16, bits=4, values=IQ2),
    23: BlockFormat("IQ4_XS", 256, 136, _iq4_xs, group=32, bits=4, values=IQ4),
    29: BlockFormat("IQ1_M", 256, 56, _iq1_m, group=16, bits=4, values=IQ1),
    34: BlockFormat("TQ1_0", 256, 54, _tq1_0, group=256, bits=4, zero=8),
    35: BlockFormat("TQ2_0", 256, 66, _tq2_0, group=256, bits=4, zero=8),
    39: BlockFormat("MXFP4", 32, 17, _mxfp4, group=32, bits=4, values=DOUBLED_E2M1),
    40: BlockFormat("NVFP4", 64, 36, _nvfp4, group=16, bits=4, values=DOUBLED_E2M1),
}
"""By the numbers of ggml."""
OTHER_NAMES = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
}
"""Names of formats that are not supported."""
