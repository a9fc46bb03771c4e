"""Linears over codes against float64 products of the exact weights: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bench.harness.code_formats import TABLES
from torch import Tensor

from millrace_shard.kernels import agreement
from millrace_shard.kernels.agreement import distance
from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cuda import packed_codes, quantized_linear
from millrace_shard.kernels.cuda.linear_tilings import MANY_ROWS
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.packed_codes import pack
from millrace_shard.kernels.cuda.quantized_linear import EXPANDED_ROWS, QuantizedLinear
from millrace_shard.kernels.cuda.triton_codes import E4M3_BY_DEVICE
from millrace_shard.kernels.cuda.triton_quantized import expand_codes
from millrace_shard.kernels.layer_blocks import SideBySide
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_testing.quantized.code_formats import random_codes

pytest.importorskip("triton", reason="no Triton for this platform")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = 3e-5
"""In parts of the sum of the absolute products: codes and scales are exact, sums are float32.

Tables that bfloat16 does not have take two numbers of it, which the interpreter cuts off.
"""
ROWS = (1, 3, 17, 70)
OUTPUTS = 24
PARTS = 576
"""Inputs that are taken in two parts."""
SHAPES = (
    *((576, group_size) for group_size in (32, 64, 128, None)),
    *((704, group_size) for group_size in (128, None)),
    (200, 48),
    (100, 24),
    (1100, 16),
)
"""Inputs and group sizes: groups of whole steps, of padded ones, a partial last group, and one group."""


class Launches:
    """A kernel whose grids are recorded."""

    def __init__(self, kernel: Any, grids: list[tuple[int, ...]]) -> None:
        self._kernel, self._grids = kernel, grids

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self._grids.append(grid)
        return self._kernel[grid]


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def stored(*parts: Tensor | QuantizedTensor, dtype: torch.dtype = BF16) -> StoredWeight:
    return StoredWeight(parts, dtype, DEVICE)


def linear_from(
    *parts: Tensor | QuantizedTensor, dtype: torch.dtype = BF16, bias: Tensor | None = None
) -> Linear:
    return CudaKernels(deterministic=True).linear_from(
        LinearWeights(stored(*parts, dtype=dtype), bias)
    )


def head_from(*parts: Tensor | QuantizedTensor, dtype: torch.dtype = BF16) -> Linear:
    """Its results are not rounded."""
    return CudaKernels(deterministic=True).head_from(LinearWeights(stored(*parts, dtype=dtype)))


def error(y: Tensor, x: Tensor, part: QuantizedTensor) -> float:
    """The largest distance from the exact products."""
    weight = part.values.double()[part.codes.int()]
    group = torch.arange(part.shape[1]) // part.group_size
    weight = weight * part.scales.double()[:, group]
    magnitude = weight.abs()
    if part.offsets is not None:
        offsets = part.offsets.double()[:, group]
        weight, magnitude = weight + offsets, magnitude + offsets.abs()
    wide = x.double().cpu()
    if part.input_order is not None:
        wide = wide[:, part.input_order]
    assert y.dtype == FP32
    difference = (y.double().cpu() - wide @ weight.T).abs() / (wide.abs() @ magnitude.T)
    return float(difference.max())


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("inputs", "group_size"), SHAPES)
def test_products_match_the_exact_weights(name: str, inputs: int, group_size: int | None) -> None:
    part = random_codes(name, OUTPUTS, inputs, group_size)
    x = normal(3, inputs)
    assert error(head_from(part)(x), x, part) < TOLERANCE


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])
def test_products_are_exact_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    part = random_codes(name, OUTPUTS, 320, 64)
    x = normal(5, 320, dtype=dtype)
    assert error(head_from(part, dtype=dtype)(x), x, part) < 2e-6


@pytest.mark.parametrize("name", TABLES)
def test_a_row_has_the_same_bits_for_any_number_of_rows(name: str) -> None:
    part = random_codes(name, OUTPUTS, PARTS, 64)
    linear, x = head_from(part), normal(max(ROWS), PARTS)
    whole = linear(x)
    assert error(whole, x, part) < TOLERANCE
    for rows in ROWS[:-1]:
        assert torch.equal(linear(x[-rows:]), whole[-rows:])


@pytest.mark.parametrize("name", ["int4 with zeros", "nf4"])
def test_a_row_has_the_same_bits_in_a_long_prompt(name: str) -> None:
    """One program takes all parts of its sums."""
    part = random_codes(name, OUTPUTS, PARTS, 64)
    linear, x = head_from(part), normal(MANY_ROWS, PARTS)
    whole = linear(x)
    assert error(whole, x, part) < TOLERANCE
    assert torch.equal(linear(x[-17:]), whole[-17:])


def test_float32_rows_have_the_same_bits_too() -> None:
    part = random_codes("int4 with zeros", OUTPUTS, PARTS, 64)
    linear, x = head_from(part, dtype=FP32), normal(max(ROWS), PARTS, dtype=FP32)
    whole = linear(x)
    for rows in ROWS[:-1]:
        assert torch.equal(linear(x[-rows:]), whole[-rows:])


def test_inputs_in_another_order_give_exact_products() -> None:
    part = random_codes("int4 with zeros", OUTPUTS, 256, 64, in_order=False)
    x = normal(4, 256)
    assert error(head_from(part)(x), x, part) < TOLERANCE


def test_results_are_rounded_once_after_the_bias() -> None:
    part = random_codes("int8", OUTPUTS, 128, None)
    x, bias = normal(4, 128, dtype=FP16), normal(OUTPUTS, dtype=FP16, seed=1)
    y = linear_from(part, dtype=FP16, bias=bias)(x)
    exact = head_from(part, dtype=FP16)(x) + bias.float()
    assert torch.equal(y, exact.half())


def test_rows_may_be_views_and_none() -> None:
    linear, x = linear_from(random_codes("e4m3", OUTPUTS, 128, None)), normal(4, 128)
    expected = linear(x)
    assert torch.equal(linear(torch.cat([x, x], dim=1)[:, :128]), expected)
    assert torch.equal(linear(x.t().contiguous().t()), expected)
    assert linear(x[:0]).shape == (0, OUTPUTS)


def test_a_nan_stays_a_nan_in_its_own_output_and_row() -> None:
    part = random_codes("e4m3", OUTPUTS, 128, None)
    part.codes[5, 7] = 127
    x = normal(3, 128)
    x[1, 3] = torch.nan
    y = head_from(part)(x)
    assert y[1].isnan().all()
    assert y[[0, 2], 5].isnan().all()
    others = [output for output in range(OUTPUTS) if output != 5]
    assert y[[0, 2]][:, others].isfinite().all()


def test_parts_of_one_format_are_one_product() -> None:
    """The parts have groups of different sizes, and one has zeros."""
    parts = [
        random_codes("int4", 10, 320, 64),
        random_codes("int4", 7, 320, None, seed=1),
        replace(random_codes("int4 with zeros", 9, 320, 128, seed=2), values=TABLES["int4"]),
    ]
    x = normal(3, 320)
    joined = head_from(*parts)
    assert isinstance(joined, QuantizedLinear)
    for part, y in zip(parts, torch.split(joined(x), [10, 7, 9], dim=1), strict=True):
        assert error(y, x, part) < TOLERANCE


def test_parts_of_several_formats_are_several_products() -> None:
    parts = [
        random_codes("int4", 10, 320, 64),
        random_codes("int8", 7, 320, None, seed=1),
        random_codes("int8", 5, 320, 24, seed=2),
        random_codes("int8", 5, 320, 32, seed=2, in_order=False),
    ]
    plain = normal(6, 320, dtype=FP32, seed=3)
    bias, x = normal(33, seed=4), normal(3, 320)
    linear = linear_from(*parts, plain, bias=bias)
    assert isinstance(linear, SideBySide)
    separate: list[Tensor | QuantizedTensor] = [*parts, plain]
    expected = [
        linear_from(part, bias=own)(x)
        for part, own in zip(separate, torch.split(bias, [10, 7, 5, 5, 6]), strict=True)
    ]
    assert torch.equal(linear(x), torch.cat(expected, dim=1))
    assert head_from(*parts, plain)(x).dtype == FP32


@pytest.mark.parametrize("deterministic", [False, True])
def test_weights_without_codes_are_linears_as_before(deterministic: bool) -> None:
    kernels = CudaKernels(deterministic=deterministic)
    weight, x = normal(OUTPUTS, 64, dtype=FP32), normal(3, 64, dtype=FP32, seed=1)
    weights = LinearWeights(StoredWeight.of(weight))
    assert torch.equal(kernels.linear_from(weights)(x), kernels.linear(weight)(x))
    assert torch.equal(kernels.head_from(weights)(x), kernels.head(weight)(x))


def test_few_rows_have_the_same_bits_in_fast_and_deterministic_mode() -> None:
    """One kernel multiplies them with codes."""
    part, x = random_codes("nf4", OUTPUTS, 128, 64), normal(3, 128)
    weights = LinearWeights(stored(part))
    fast, deterministic = (
        CudaKernels(deterministic=each).linear_from(weights)(x) for each in (False, True)
    )
    assert torch.equal(fast, deterministic)


@pytest.mark.parametrize("name", ["int4 with zeros", "nf4", "e4m3"])
def test_fast_mode_multiplies_long_prompts_with_weights_that_are_expanded_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of the outputs, which do not divide them, with padded steps of groups, in an order of the codes."""
    part = random_codes(name, OUTPUTS, 200, 48, in_order=False)
    monkeypatch.setattr(quantized_linear, "MOST_EXPANDED_BYTES", 9 * 200 * BF16.itemsize)
    monkeypatch.setattr(quantized_linear, "EXPANDED_OUTPUTS", 16)
    launches: list[tuple[int, ...]] = []
    monkeypatch.setattr(quantized_linear, "expand_codes", Launches(expand_codes, launches))
    x, bias = normal(EXPANDED_ROWS, 200), normal(OUTPUTS, seed=1)
    weights = LinearWeights(stored(part), bias)
    linear = CudaKernels(deterministic=False, operators=["cublas"]).linear_from(weights)
    expected = PlainKernels(deterministic=False).linear_from(weights)(x)
    assert distance([linear(x)], [expected]) < agreement.TOLERANCE[BF16]
    assert launches == [(5, 1, 1), (5, 1, 1)]
    few = x[: EXPANDED_ROWS - 1]
    assert torch.equal(linear(few)[:3], linear(few[:3]))
    assert len(launches) == 2


@pytest.mark.parametrize("name", TABLES)
def test_expanded_weights_are_the_exact_ones_rounded_once(name: str) -> None:
    """The interpreter rounds to float16, and to no bfloat16."""
    part = random_codes(name, OUTPUTS, 100, 24)
    weight = stored(part, dtype=FP16)
    packed = pack([part], FP16, DEVICE, weight.copy)
    expanded = torch.empty(10, 100, dtype=FP16, device=DEVICE)
    quantized_linear.expand(expanded, packed, 7)
    assert torch.equal(expanded, weight.copied()[7:17])


@pytest.mark.parametrize("name", TABLES)
def test_linears_over_codes_agree_with_plain_torch(name: str) -> None:
    """Whose weights are rounded to the dtype of the model after they are scaled."""
    weights, x = LinearWeights(stored(random_codes(name, OUTPUTS, 200, 64))), normal(1, 200)
    kernels, plain = CudaKernels(deterministic=True), PlainKernels(deterministic=False)
    ours, theirs = ([each.linear_from(weights)(x)] for each in (kernels, plain))
    assert distance(ours, theirs) < agreement.TOLERANCE[BF16]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_bytes_of_e4m3_are_converted_to_their_values(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All 256 but NaN, which Triton's interpreter reads as a number."""
    monkeypatch.setattr(packed_codes, "converts_e4m3", lambda _: True)
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    values = TABLES["e4m3"]
    codes[values[codes.int()].isnan()] = 0
    part = QuantizedTensor(codes=codes, values=values, scales=torch.ones(16, 1), group_size=16)
    linear = CudaKernels(deterministic=True).linear_from(
        LinearWeights(StoredWeight((part,), dtype, DEVICE))
    )
    assert isinstance(linear, QuantizedLinear)
    assert linear._weight.kind == E4M3_BY_DEVICE
    result = linear(torch.eye(16, dtype=dtype, device=DEVICE))
    assert torch.equal(result.float().cpu(), values[codes.int()].T)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codes_of_bitsandbytes_are_decoded_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """fp4 as sixths, nf4 as the sum of its value in the dtype and of what that lacks."""
    values = TABLES[name]
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16) % 16
    part = QuantizedTensor(codes=codes, values=values, scales=torch.ones(16, 1), group_size=16)
    result = head_from(part, dtype=dtype)(torch.eye(16, dtype=dtype, device=DEVICE)).cpu()
    first = values.to(dtype).float()
    exact = values if name == "fp4" else first + (values - first).to(dtype).float()
    assert torch.equal(result, exact[codes.int()].T)
