"""What tests of several rooms of the router need."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
