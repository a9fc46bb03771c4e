"""The layout of codes on the device: it is small, and loses nothing."""

from __future__ import annotations

import pytest
import torch
from bench.harness.code_formats import TABLES

from millrace_shard.device.transfers import copy_directly
from millrace_shard.kernels.cuda.packed_codes import PackedCodes, can_join, pack
from millrace_shard.kernels.cuda.triton_codes import E2M1, E4M3
from millrace_shard.kernels.cuda.triton_quantized import INTEGERS, SIXTHS, SUMS, TABLE
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_testing.quantized.code_formats import random_codes

CPU = torch.device("cpu")


def packed(*parts: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> PackedCodes:
    return pack(parts, dtype, CPU, copy_directly)


def element(codes: PackedCodes, output: int, column: int) -> float:
    """An element without its offset, computed from the layout that the class describes."""
    group = column // codes.group_size
    within = column - group * codes.group_size
    place, at = divmod(within, codes.step)
    line = codes.codes[group * (codes.group_steps or 0) + place, output].tolist()
    code = line[at] if codes.bits == 8 else line[at // 2] >> 4 * (at % 2) & 15
    value = float(codes.values[code])
    assert codes.kind != INTEGERS or value == codes.least + code
    return value * float(codes.scales[group, output])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("inputs", "group_size"), [(200, 64), (100, 24), (90, None)])
def test_every_element_is_kept(name: str, inputs: int, group_size: int | None) -> None:
    part = random_codes(name, 3, inputs, group_size)
    result = packed(part)
    weight = (
        part.values[part.codes.int()]
        * part.scales.repeat_interleave(part.group_size, 1)[:, :inputs]
    ).tolist()
    for output in range(3):
        for column in range(inputs):
            assert element(result, output, column) == pytest.approx(weight[output][column], 1e-7)


def test_codes_and_scales_take_few_bytes() -> None:
    result = packed(random_codes("nf4", 6, 256, 64))
    assert result.codes.nbytes == 6 * 256 // 2
    assert result.scales.nbytes == 6 * 4 * 2
    assert packed(random_codes("int8", 6, 576, 128)).codes.nbytes == 6 * 576


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(0.1, torch.float32), (2.0**-10 * 1.5, torch.float16), (2.0**-60, torch.bfloat16)],
)
def test_scales_are_never_rounded(scale: float, dtype: torch.dtype) -> None:
    part = random_codes("e2m1", 4, 64, 32)
    part.scales.fill_(scale)
    result = packed(part).scales
    assert result.dtype == dtype
    assert torch.equal(result.float(), part.scales.t())


@pytest.mark.parametrize(
    ("name", "kind", "least"),
    [
        *(("int4", INTEGERS, -8), ("int4 with zeros", INTEGERS, 0), ("int8", INTEGERS, -128)),
        *(("nf4", SUMS, 0), ("fp4", SIXTHS, 0), ("e2m1", E2M1, 0), ("e4m3", E4M3, 0)),
    ],
)
def test_only_numbers_that_follow_from_no_bits_need_a_table(
    name: str, kind: int, least: int
) -> None:
    part = random_codes(name, 4, 64, 32)
    result = packed(part)
    assert (result.kind, result.least) == (kind, least)
    in_float32 = packed(part, dtype=torch.float32)
    assert in_float32.kind == (TABLE if kind in (SIXTHS, SUMS) else kind)


def test_both_numbers_of_a_sum_are_bits_of_one_word() -> None:
    words = packed(random_codes("nf4", 4, 64, 32)).lookup.tolist()
    for word, value in zip(words, TABLES["nf4"].tolist(), strict=True):
        first, second = (
            torch.tensor(bits - (bits >> 15 << 16), dtype=torch.int16).view(torch.bfloat16)
            for bits in (word >> 16 & 0xFFFF, word & 0xFFFF)
        )
        assert first == torch.tensor(value).to(torch.bfloat16)
        assert abs(float(first) + float(second) - value) <= abs(value) * 2.0**-17


def test_parts_that_are_not_exactly_one_matrix_are_not_joined() -> None:
    part = random_codes("e4m3", 4, 96, 32)
    assert can_join(part, random_codes("e4m3", 4, 96, None))
    assert can_join(part, random_codes("e4m3", 4, 96, 64))
    assert not can_join(part, random_codes("e4m3", 4, 96, 48))
    assert not can_join(part, random_codes("int8", 4, 96, 32))
    ordered = random_codes("e4m3", 4, 96, 32, in_order=False)
    assert not can_join(part, ordered)
    assert can_join(ordered, ordered)
    assert not can_join(ordered, random_codes("e4m3", 4, 96, 32, in_order=False, seed=1))
