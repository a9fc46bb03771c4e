"""The units that multiply tiles on this CPU, for tests that run on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from millrace_shard.kernels.build import BuildError, load_operators

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


def need_brgemm() -> None:
    """Skip the test where ATen's brgemm has no bfloat16."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2" or not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("no bfloat16 products by brgemm on this CPU")
