"""Fixtures of all tests of the shard."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

from millrace_shard.kernels import kept_results
from millrace_testing.triton_interpreter import spare_unused_work

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    spare_unused_work()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Use one thread: with two test processes on two cores, threads that wait for each other are several times slower.

    Tests of threads set their number.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make each check run, whatever earlier starts on this machine have kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_results, "cache_folder", tmp_path_factory.mktemp)
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Use two threads, over which libraries could split a long row."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def gpu() -> torch.device:
    """Skips where there is no GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda", 0)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample as on devices that must not be waited for."""
    monkeypatch.setattr("millrace_shard.device.transfers.is_synchronous", lambda _: False)


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_no_garbage() -> None:
    """Spare each collection of garbage, of which every warm-up is one, what earlier tests have left alive.

    In a process that has run thousands of tests it took half a second, two hundred times.
    """
    gc.collect()
    gc.freeze()
