"""Products with weights in e4m3 by torch's `scaled_mm`: by itself on CPU, and by its documentation for blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from bench.harness.code_formats import code_format
from torch import Tensor

pytest.importorskip("triton", reason="no Triton for this platform")

from millrace_shard.kernels.agreement import TOLERANCE, distance
from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cuda import scaled_products
from millrace_shard.kernels.cuda.operators import CudaKernels
from millrace_shard.kernels.cuda.quantized_linear import EXPANDED_ROWS
from millrace_shard.kernels.cuda.scaled_products import coded_rows
from millrace_shard.kernels.cuda.served_agreement import prompt_difference
from millrace_shard.kernels.layer_shape import LayerShape
from millrace_shard.kernels.layer_weights import LinearWeights
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import QuantizedTensor
from millrace_shard.kernels.stored_weight import StoredWeight
from millrace_testing.quantized.code_formats import random_codes

BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OUTPUTS, INPUTS = 256, 384
FORMAT = replace(code_format("e4m3", None), e4m3_inputs=True)
ROUNDING = 2**-8
"""Of results to bfloat16."""


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of products with blocks, which torch has on sm_90 only."""
    shapes: list[tuple[int, ...]] = []
    kinds = F.ScalingType

    def multiply(
        a: Tensor,
        b: Tensor,
        *scaling: Any,
        bias: Tensor | None,
        output_dtype: torch.dtype,
    ) -> Tensor:
        scale_a, recipe_a, scale_b, recipe_b = scaling
        assert (recipe_a, recipe_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
        assert bias is None
        (rows, inputs), outputs = a.shape, b.shape[1]
        assert rows % 4 == 0
        assert b.stride(0) == 1
        assert scale_a.shape == (rows, inputs // 128)
        assert scale_a.stride() == (1, rows)
        padded = -(-inputs // 512) * 4
        assert scale_b.shape == (padded, outputs // 128)
        assert scale_b.stride() == (1, padded)
        wide = a.double() * scale_a.double().repeat_interleave(128, 1)
        scales = scale_b[: inputs // 128].double().repeat_interleave(128, 0)
        shapes.append((rows, inputs, outputs))
        product: Tensor = wide @ (b.double() * scales.repeat_interleave(128, 1))
        return product.to(output_dtype)

    monkeypatch.setattr("torch.nn.functional.scaled_mm", multiply)
    monkeypatch.setattr(scaled_products, "_has_blocks", lambda _: True)
    return shapes


def weight_of(group_size: int | None, inputs: int = INPUTS) -> QuantizedTensor:
    part = random_codes("e4m3", OUTPUTS, inputs, group_size)
    of_block = torch.arange(OUTPUTS) // 128 * 128
    scales = part.scales if group_size is None else part.scales[of_block]
    return replace(part, scales=scales, e4m3_inputs=True)


def linear(part: QuantizedTensor, *operators: str, bias: Tensor | None = None) -> Linear:
    weight = StoredWeight((part,), BF16, DEVICE)
    kernels = CudaKernels(deterministic=False, operators=operators)
    return kernels.linear_from(LinearWeights(weight, bias))


def random_rows(count: int, inputs: int = INPUTS) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)


def rounded(x: Tensor, width: int) -> Tensor:
    """Rows in e4m3 with a scale for each `width` inputs, by torch's conversion, in float64."""
    groups = x.float().view(len(x), -1, width)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / torch.where(scale > 0, scale, 1.0)).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).view(x.shape)


@pytest.mark.parametrize("width", [INPUTS, 128])
def test_rows_are_rounded_to_e4m3_as_torch_rounds(width: int) -> None:
    x = random_rows(6)
    x[1] = 0
    x[2, :128] *= 1e-4
    x[3, 5] = torch.nan
    codes, scales = coded_rows(x, width)
    ours = codes[:6].double() * scales[:6].double().repeat_interleave(width, 1)
    expected = rounded(x, width)
    assert torch.equal(ours[[0, 1, 2, 4, 5]], expected[[0, 1, 2, 4, 5]])
    assert ours[3, :width].isnan().all()
    assert len(codes) == (6 if width == INPUTS else 8)


@pytest.mark.parametrize("group_size", [None, 128])
def test_many_rows_are_multiplied_in_e4m3(
    group_size: int | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = None if group_size is None else request.getfixturevalue("blocks")
    monkeypatch.setattr(scaled_products, "MOST_BYTES", 128 * INPUTS)
    part, bias = weight_of(group_size), torch.linspace(-2, 2, OUTPUTS).to(DEVICE, BF16)
    x = random_rows(EXPANDED_ROWS + 1)
    y = linear(part, "scaled_mm", "cublas", bias=bias)(x)
    wide = rounded(x, group_size or INPUTS)
    expected = wide @ part.dequantized().double().T.to(DEVICE) + bias.double()
    assert ((y.double() - expected).abs() / (1 + expected.abs())).max() < 2 * ROUNDING
    if shapes is not None:
        assert shapes == [(EXPANDED_ROWS + 4, INPUTS, 128)] * 2
    few, plain = x[: EXPANDED_ROWS - 1], linear(part, bias=bias)
    assert torch.equal(linear(part, "scaled_mm", bias=bias)(few), plain(few))


@pytest.mark.parametrize(
    "part",
    [
        replace(weight_of(None), e4m3_inputs=False),
        replace(random_codes("int8", OUTPUTS, INPUTS, None), e4m3_inputs=True),
        weight_of(128),
        weight_of(None).rows(0, 24),
    ],
    ids=["exact-inputs", "int8", "blocks-elsewhere", "odd-outputs"],
)
def test_other_weights_stay_with_exact_rows(part: QuantizedTensor) -> None:
    x = random_rows(EXPANDED_ROWS)
    assert torch.equal(linear(part, "scaled_mm")(x), linear(part)(x))


def test_inputs_that_are_not_whole_blocks_stay_exact(blocks: list[tuple[int, ...]]) -> None:
    part, x = weight_of(128, 192), random_rows(EXPANDED_ROWS, 192)
    assert torch.equal(linear(part, "scaled_mm")(x), linear(part)(x))
    assert blocks == []


def test_the_check_at_the_start_has_rows_that_e4m3_has_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that it tells a wrong operator from the rounding of rows."""
    x = random_rows(EXPANDED_ROWS)
    part = weight_of(None)
    plain = PlainKernels(deterministic=False)
    exact = plain.linear_from(LinearWeights(StoredWeight((part,), BF16, DEVICE)))(x)
    assert distance([linear(part, "scaled_mm")(x)], [exact]) > TOLERANCE[BF16]
    shape = LayerShape(
        num_heads=2, num_kv_heads=1, head_dim=16, linears=((128, 256),), formats=(FORMAT,)
    )
    kernels = CudaKernels(deterministic=False, operators=["scaled_mm"])
    difference = partial(prompt_difference, kernels, plain, dtype=BF16, shape=shape, device=DEVICE)
    assert difference() < TOLERANCE[BF16]
    multiply = F.scaled_mm
    monkeypatch.setattr(
        "torch.nn.functional.scaled_mm", lambda *args, **kw: multiply(*args, **kw) * 1.1
    )
    assert difference() > TOLERANCE[BF16]
