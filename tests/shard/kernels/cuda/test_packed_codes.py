"""The layout of codes on the device: it is small, and loses nothing."""

from __future__ import annotations

import pytest
import torch

from millrace_shard.device.transfers import copy_directly
from millrace_shard.kernels.cuda.packed_codes import PackedCodes, can_join, pack
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_testing.quantized.code_formats import TABLES, random_codes

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
    assert codes.least is None or value == codes.least + code
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
    ("name", "least", "remainder"),
    [
        *(("int4", -8, False), ("int4 with zeros", 0, False), ("int8", -128, False)),
        *(("nf4", None, True), ("fp4", None, True), ("e2m1", None, False), ("e4m3", None, False)),
    ],
)
def test_integers_need_no_table_and_exact_tables_no_remainder(
    name: str, least: int | None, remainder: bool
) -> None:
    part = random_codes(name, 4, 64, 32)
    assert (packed(part).least, packed(part).has_remainder) == (least, remainder)
    assert not packed(part, dtype=torch.float32).has_remainder


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
