"""What multiplies tiles on this CPU, for tests that hold on each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from millrace_shard.kernels.build import BuildError, load_operators

TILE_UNITS = ("amx", "avx512")


@contextmanager
def tiles_by(unit: str) -> Iterator[None]:
    """Multiply tiles by one of TILE_UNITS; skips the test where there are no operators or this one is not there."""
    try:
        load_operators()
    except BuildError as error:
        pytest.skip(str(error))
    operators = torch.ops.millrace
    if not operators.tile_unit():
        pytest.skip("nothing multiplies tiles on this CPU")
    operators.use_amx(unit == "amx")
    try:
        if operators.tile_unit() != unit:
            pytest.skip(f"no {unit} on this CPU")
        yield
    finally:
        operators.use_amx(True)
