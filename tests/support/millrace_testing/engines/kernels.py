"""The kernels that serve, for tests that hold for all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import BuildError, load_operators, packaged_library, toolchains
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.plain import PlainKernels

KERNELS = ("plain", "cpu")


def make_kernels(name: str, *, deterministic: bool, block_size: int = 16) -> Kernels:
    """Kernels by name; skips the test where the CPU's cannot be compiled or run. `block_size` is plain's."""
    if name == "plain":
        return PlainKernels(deterministic=deterministic, block_size=block_size)
    try:
        best = toolchains()[0]
    except BuildError as error:
        pytest.skip(str(error))
    if best.compiler is None and packaged_library(best) is None:
        pytest.skip("no C++ compiler")
    load_operators()
    return CpuKernels(deterministic=deterministic)


TILE_UNITS = ("amx", "avx512", "avx2")
"""The last one is there where torch takes the CPU for one without AVX512: ATEN_CPU_CAPABILITY=avx2."""


@contextmanager
def tiles_by(unit: str) -> Iterator[None]:
    """Multiply tiles by one of TILE_UNITS; skips the test where there are no operators or this one is not there."""
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    operators = torch.ops.millrace
    operators.use_amx(unit == "amx")
    try:
        if operators.tile_unit() != unit:
            pytest.skip(f"tiles are multiplied by {operators.tile_unit()} here, not by {unit}")
        yield
    finally:
        operators.use_amx(True)


CACHE_DTYPES = (None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""None: the dtype of the model."""
SCALES = (0.03, 0.02)
"""Of keys and of values in fp8: some values of a normal distribution saturate in e4m3."""
_FORMATS = {torch.float8_e4m3fn: (3, 7, 448.0), torch.float8_e5m2: (2, 15, 57344.0)}
"""Bits of the fraction, bias of the exponent, and the largest number."""


def as_kept(x: Tensor, cache_dtype: torch.dtype | None, scale: float) -> Tensor:
    """`x` [..., head_dim] in float64 as a cache returns it; `scale` is that of fp8."""
    if cache_dtype is None:
        return x.double()
    if cache_dtype == torch.int8:
        largest = x.float().abs().amax(-1, keepdim=True)
        scales = largest * torch.tensor(1 / 127)
        # A quotient in float64 would round to another code where that in float32 is half a code.
        return (x.float() / scales).round().double() * scales.double()
    kept = float(torch.tensor(scale))
    return _nearest((x.float() / kept).double(), *_FORMATS[cache_dtype]) * kept


def _nearest(x: Tensor, bits: int, bias: int, largest: float) -> Tensor:
    """The nearest number of the format; of two, the one whose code is even."""
    numbers = _numbers(bits, bias, largest)
    size = x.abs().clamp(max=largest)
    above = torch.searchsorted(numbers, size).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    down, up = size - numbers[below], numbers[above] - size
    takes_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(takes_above, numbers[above], numbers[below]) * x.sign()


@functools.cache
def _numbers(bits: int, bias: int, largest: float) -> Tensor:
    """The numbers of codes 0, 1, … up to the largest one."""
    codes = range(128)
    found = [
        (code % 2**bits / 2**bits + (code >= 2**bits)) * 2.0 ** (max(code >> bits, 1) - bias)
        for code in codes
    ]
    return torch.tensor([number for number in found if number <= largest], dtype=torch.float64)
