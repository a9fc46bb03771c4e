"""Processes that lose their parent in these tests become children of the test process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture(autouse=True)
def adopt_orphans() -> Iterator[None]:
    """Make this process the parent of orphans, so that it can wait for their end."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
