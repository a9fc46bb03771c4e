"""The kernels that serve, for tests that hold for all of them."""

from __future__ import annotations

import pytest
import torch

from millrace_shard.kernels.base import Kernels
from millrace_shard.kernels.build import BuildError, Toolchain, load_operators
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.kernels.plain import PlainKernels

KERNELS = ("plain", "cpu")


def make_kernels(
    name: str, *, deterministic: bool, dtype: torch.dtype = torch.float32, block_size: int = 16
) -> Kernels:
    """Kernels by name; skips the test where the CPU's cannot be compiled or run. `block_size` is plain's."""
    if name == "plain":
        return PlainKernels(deterministic=deterministic, block_size=block_size)
    try:
        compiler = Toolchain.find().compiler
    except BuildError as error:
        pytest.skip(str(error))
    if compiler is None:
        pytest.skip("no C++ compiler")
    if dtype is torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("no bfloat16 products on this CPU")
    load_operators()
    return CpuKernels(deterministic=deterministic)
