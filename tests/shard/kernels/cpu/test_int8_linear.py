"""int8 linears: rounded rows, the same by tiles and in plain torch, and with any other rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from millrace_shard.kernels.base import Linear
from millrace_shard.kernels.cpu.int8_linear import PlainInt8Linear, with_int8
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.cpu.tile_blocks import PanelLinear
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.kernels.quantized import quantize_rows, rounded_rows

BF16 = torch.bfloat16
SIZES = [(96, 64), (576, 576), (1000, 130), (70, 4100), (24, 33), (1, 16)]


pytestmark = pytest.mark.usefixtures("two_threads", "seed")


def tiled(weight: Tensor, bias: Tensor | None) -> Linear:
    return with_int8(CpuKernels(deterministic=True)).linear(weight, bias)


def weight_of(out: int, inputs: int) -> Tensor:
    return (torch.randn(out, inputs) / math.sqrt(inputs)).to(BF16)


def test_rows_are_scaled_to_their_largest_and_rounded_to_even() -> None:
    rows = torch.tensor([[127.0, 0.5, 1.5, -2.5], [-2.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    quantized, worth = quantize_rows(rows)
    assert quantized.tolist() == [[127, 0, 2, -2], [-127, 64, 0, 0], [0, 0, 0, 0]]
    assert worth.flatten().tolist() == pytest.approx([1.0, 2 / 127, 0.0])


def test_every_32_inputs_of_a_row_have_their_own_scale() -> None:
    rows = torch.zeros(2, 70)
    rows[0, :2], rows[0, 32:34], rows[0, 64:66] = torch.tensor(
        [[127.0, 0.6], [12.7, 0.06], [1270, 4]]
    )
    rounded = rounded_rows(rows)
    result = torch.stack((rounded[0, :2], rounded[0, 32:34], rounded[0, 64:66]))
    torch.testing.assert_close(
        result, torch.tensor([[127.0, 1.0], [12.7, 0.1], [1270, 0]]).double()
    )
    assert int(rounded.count_nonzero()) == 5


@pytest.mark.parametrize(("out", "inputs"), SIZES)
def test_products_match_integers(out: int, inputs: int) -> None:
    weight, x = weight_of(out, inputs), torch.randn(40, inputs).to(BF16)
    y = PlainInt8Linear(weight, None)(x)
    wq, ws = quantize_rows(weight)
    expected = np.zeros((40, out))
    for start in range(0, inputs, 32):
        xq, xs = quantize_rows(x[:, start : start + 32])
        columns = wq[:, start : start + 32].numpy().astype(np.int64)
        expected += xq.numpy().astype(np.int64) @ columns.T * xs.double().numpy()
    expected *= ws.flatten().double().numpy()
    torch.testing.assert_close(y.double(), torch.from_numpy(expected), rtol=2**-8, atol=1e-9)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("out", "inputs"), SIZES)
@pytest.mark.usefixtures("tiles")
def test_tiles_match_plain_torch(out: int, inputs: int, with_bias: bool) -> None:
    weight, x = weight_of(out, inputs), torch.randn(600, inputs).to(BF16)
    bias = torch.randn(out).to(BF16) if with_bias else None
    fast, plain = tiled(weight, bias)(x), PlainInt8Linear(weight, bias)(x)
    # Sums in float32 differ from those in float64 by less than a rounding to bfloat16, and seldom change one.
    torch.testing.assert_close(fast, plain, rtol=2**-7, atol=1e-4)
    assert float((fast == plain).double().mean()) > 0.99


@pytest.mark.parametrize(("out", "inputs"), SIZES)
@pytest.mark.usefixtures("tiles")
def test_a_row_has_the_same_bits_in_any_batch(out: int, inputs: int) -> None:
    linear = tiled(weight_of(out, inputs), None)
    x = torch.randn(600, inputs).to(BF16)
    whole = linear(x)
    for rows in (1, 15, 16, 17, 32, 33, 511, 513):
        torch.set_num_threads(1 + rows % 3)
        for start in (0, 600 - rows):
            assert torch.equal(linear(x[start : start + rows]), whole[start : start + rows])
    assert linear(x[:0]).shape == (0, out)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [tiled, PlainInt8Linear])
@pytest.mark.usefixtures("tiles")
def test_a_row_that_is_not_finite_spoils_only_itself(
    kind: Callable[[Tensor, Tensor | None], Linear], bad: float
) -> None:
    linear = kind(weight_of(64, 96), None)
    x = torch.randn(3, 96).to(BF16)
    expected = linear(x)
    x[1, 7] = bad
    y = linear(x)
    assert bool(y[1].isnan().all())
    assert torch.equal(y[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("kind", [tiled, PlainInt8Linear])
@pytest.mark.usefixtures("tiles")
def test_rows_next_to_nothing_are_zeros(kind: Callable[[Tensor, Tensor | None], Linear]) -> None:
    y = kind(weight_of(64, 96), None)(torch.full((2, 96), 1e-38).to(BF16))
    assert torch.equal(y, torch.zeros_like(y))


def test_an_int8_linear_is_close_to_the_unquantized_one() -> None:
    weight, x = weight_of(512, 2048), torch.randn(64, 2048).to(BF16)
    exact = F.linear(x.double(), weight.double())
    y = PlainInt8Linear(weight, None)(x).double()
    assert float((y - exact).norm() / exact.norm()) < 0.02


@pytest.mark.usefixtures("tiles")
def test_only_the_heads_weights_stay_as_they_are() -> None:
    weight = weight_of(64, 96)
    x = torch.randn(5, 96).to(BF16)
    kernels = with_int8(CpuKernels(deterministic=True))
    assert isinstance(kernels.linear(weight), PanelLinear)
    assert not torch.equal(kernels.linear(weight)(x).float(), kernels.head(weight)(x))
    exact = F.linear(x.double(), weight.double())
    torch.testing.assert_close(kernels.head(weight)(x).double(), exact, rtol=1e-5, atol=1e-5)
    assert kernels.block_size == 64
    assert isinstance(with_int8(PlainKernels(deterministic=True)).head(weight)(x), Tensor)
