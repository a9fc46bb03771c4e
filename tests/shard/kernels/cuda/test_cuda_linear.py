"""The linear of deterministic mode against plain torch and against itself: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.device import process_group
from millrace_shard.kernels.cuda import linear_tilings, triton_linear
from millrace_shard.kernels.cuda.linear_tilings import (
    MANY_ROWS,
    PROMPT_ROWS,
    PROMPTS,
    part_length,
    row_tiling,
)
from millrace_shard.kernels.cuda.operators import CudaKernels, Float32Head
from millrace_shard.kernels.cuda.triton_linear import FixedOrderLinear

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# In parts of 1 + size. The interpreter casts to bfloat16 by cutting off, as numpy has none.
TOLERANCE = {BF16: 0.02, FP16: 0.002, FP32: 2e-6}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
STREAMING_MULTIPROCESSORS = 132
"""An H100 has as many."""


@pytest.fixture(params=[BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    assert isinstance(request.param, torch.dtype)
    return request.param


def normal(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def graded(rows: int, columns: int, seed: int) -> Tensor:
    """Small integers, times a power of two for each 64 columns.

    Float32 sums of products over such columns are exact in any order, and sums of those sums are not.
    """
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 9, (rows, columns), generator=generator)
    powers = torch.randint(0, 12, (-(-columns // 64),), generator=generator)
    return integers * 2.0 ** powers.repeat_interleave(64)[:columns]


def sum_in_order(x: Tensor, weight: Tensor, part: int, step: int) -> Tensor:
    """Float32 sums over `step` inputs, added up to parts, which are added up to the whole."""
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, x.shape[1], part):
        end = min(begin + part, x.shape[1])
        added = torch.zeros_like(total)
        for at in range(begin, end, step):
            block = slice(at, min(at + step, end))
            added += (x[:, block].double() @ weight[:, block].double().T).float()
        total += added
    return total


def error(out: Tensor, expected: Tensor) -> float:
    assert out.shape == expected.shape
    difference = (out.double() - expected.double()).abs() / (1 + expected.double().abs())
    return float(difference.max())


@pytest.mark.parametrize(
    ("out", "inputs", "with_bias"),
    [(96, 64, True), (70, 1100, False), (70, 1100, True), (1, 16, True)],
)
@pytest.mark.parametrize("rows", [5, 70, MANY_ROWS])
def test_products_match_their_definition(
    dtype: torch.dtype, rows: int, out: int, inputs: int, with_bias: bool
) -> None:
    weight = normal(dtype, out, inputs) / math.sqrt(inputs)
    bias = normal(dtype, out, seed=1) if with_bias else None
    x = normal(dtype, rows, inputs, seed=2)
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    y = CudaKernels(deterministic=True).linear(weight, bias)(x)
    assert y.dtype == dtype
    assert error(y, expected) < TOLERANCE[dtype]


def test_rows_of_a_long_prompt_have_the_bits_of_few_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of prompts have larger tiles where the inputs are one part; the interpreter has room for less."""
    if DEVICE.type == "cpu":
        smaller = dataclasses.replace(PROMPTS, rows=128, outputs=64)
        monkeypatch.setattr(linear_tilings, "PROMPTS", smaller)
    x, weight = graded(PROMPT_ROWS + 5, 64, 1), graded(40, 64, 2)
    assert part_length(40, 64) >= 64
    linear = FixedOrderLinear(weight.to(DEVICE, dtype), None, out_dtype=FP32)
    moved = x.to(DEVICE, dtype)
    whole = linear(moved)
    for rows in (1, 65, MANY_ROWS):
        assert torch.equal(linear(moved[-rows:]), whole[-rows:])
    tile = linear_tilings.FLOAT32 if dtype == FP32 else linear_tilings.PROMPTS
    assert row_tiling(dtype, PROMPT_ROWS, has_one_sum=True) is tile
    assert row_tiling(dtype, PROMPT_ROWS) == row_tiling(dtype, MANY_ROWS, has_one_sum=True)


def test_sums_are_taken_in_the_same_order_for_any_number_of_rows(dtype: torch.dtype) -> None:
    x, weight = graded(MANY_ROWS + 30, 1100, 1), graded(70, 1100, 2)
    part = part_length(70, 1100)
    assert part < 1100
    step = row_tiling(dtype, 1).inputs
    expected = sum_in_order(x, weight, part, step)
    # The order matters: another split has other bits.
    assert (sum_in_order(x, weight, 2 * part, step) != expected).any()
    linear = FixedOrderLinear(weight.to(DEVICE, dtype), None, out_dtype=FP32)
    given = x.to(DEVICE, dtype)
    if DEVICE.type == "cuda":
        # Tensor cores have shorter steps than the interpreter.
        expected = linear(given).cpu()
    for rows in (1, 16, 17, 65, MANY_ROWS - 1, len(x)):
        assert torch.equal(linear(given[-rows:]).cpu(), expected[-rows:])


def test_a_row_has_the_same_bits_with_a_bias_and_in_its_own_dtype(dtype: torch.dtype) -> None:
    weight = graded(70, 1100, 1).to(DEVICE, dtype) / 2**12
    x = graded(MANY_ROWS, 1100, 2).to(DEVICE, dtype) / 2**12
    linear = CudaKernels(deterministic=True).linear(weight, normal(dtype, 70))
    whole = linear(x)
    for rows in (1, 33, 65):
        for start in (0, MANY_ROWS - rows):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize("rows", [3, MANY_ROWS])
def test_rows_may_be_views(rows: int) -> None:
    weight, x = normal(FP16, 40, 80), normal(FP16, rows, 80, seed=1)
    linear = FixedOrderLinear(weight, None)
    expected = linear(x)
    assert torch.equal(linear(torch.cat([x, x], dim=1)[:, :80]), expected)
    assert torch.equal(linear(x.t().contiguous().t()), expected)


def test_many_tiles_and_no_rows_give_exact_products() -> None:
    weight, x = normal(FP32, 330, 16), normal(FP32, 900, 16, seed=1)
    linear = FixedOrderLinear(weight, None)
    assert error(linear(x), x.double() @ weight.double().T) < TOLERANCE[FP32]
    assert linear(x[:0]).shape == (0, 330)


def test_logits_are_float32_sums(dtype: torch.dtype) -> None:
    weight, x = normal(dtype, 70, 1100), normal(dtype, 3, 1100, seed=1)
    logits = CudaKernels(deterministic=True).head(weight)(x)
    assert logits.dtype == FP32
    assert error(logits, x.double() @ weight.double().T) < 1e-5


def test_logits_of_the_library_are_float32_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def documented(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        """`torch.mm` with `out_dtype`, which torch has for CUDA only."""
        assert out_dtype == FP32
        return left.float() @ right.float()

    if DEVICE.type == "cpu":
        monkeypatch.setattr(torch, "mm", documented)
    weight, x = normal(BF16, 70, 1100), normal(BF16, 3, 1100, seed=1)
    logits = Float32Head(weight)(x)
    assert logits.dtype == FP32
    assert error(logits, x.double() @ weight.double().T) < 1e-5


def test_each_tile_goes_through_a_part_in_whole_steps() -> None:
    for tiling in (linear_tilings.FLOAT32, *linear_tilings.TENSOR_CORES):
        assert linear_tilings.PART_STEP % tiling.inputs == 0


@pytest.mark.parametrize(("out", "inputs"), LLAMA_8B)
def test_a_single_row_occupies_a_gpu(out: int, inputs: int) -> None:
    num_parts = -(-inputs // part_length(out, inputs))
    tiles = -(-out // row_tiling(BF16, 1).outputs)
    assert tiles * num_parts >= STREAMING_MULTIPROCESSORS


def test_parts_take_little_memory() -> None:
    for out in (1, 576, 3071, 3072, 8191, 8192, 16383, 16384, 250000):
        num_parts = -(-30000 // part_length(out, 30000))
        assert num_parts == 1 or num_parts * out <= 1 << 15


@pytest.mark.parametrize("shape", [(3, 5), (2, 2, 70), (0, 4), (1500,)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_parts_of_ranks_are_added_in_one_launch_with_the_bits_of_plain_torch(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[None] = []
    add = triton_linear.add_parts
    monkeypatch.setattr(triton_linear, "add_parts", lambda *given: launches.append(add(*given)))
    generator = torch.Generator().manual_seed(1)
    parts = (torch.randn(8, *shape, generator=generator) * 9).to(DEVICE, dtype)
    parts[:, ..., 0] = -0.0
    total = triton_linear.sum_ranks(parts)
    expected = process_group.sum_in_order(parts)
    assert torch.equal(total, expected)
    assert torch.equal(total.signbit(), expected.signbit())
    assert total.dtype is dtype
    assert len(launches) == (1 if expected.numel() else 0)
