"""Fixtures of the tests of kernels for CPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millrace_testing.engines.kernels import TILE_UNITS, tiles_by


@pytest.fixture
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=TILE_UNITS)
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Multiply tiles by each unit of this CPU."""
    with tiles_by(request.param):
        yield


@pytest.fixture(scope="module", params=TILE_UNITS)
def unit(request: pytest.FixtureRequest) -> Iterator[str]:
    """Multiply tiles by each unit of this CPU in all tests of a file, on two threads."""
    torch.set_num_threads(2)
    with tiles_by(request.param):
        yield request.param
    torch.set_num_threads(1)
