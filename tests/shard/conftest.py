"""Fixtures of all tests of the shard."""

from __future__ import annotations

import gc
import importlib.util
import os

import pytest
import torch

from millrace_testing.triton_interpreter import spare_unused_work

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    spare_unused_work()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    """Use one thread: with two test processes on two cores, threads that wait for each other are several times slower.

    Tests of threads set their number.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_no_garbage() -> None:
    """Spare each collection of garbage, of which every warm-up is one, what earlier tests have left alive.

    In a process that has run thousands of tests it took half a second, two hundred times.
    """
    gc.collect()
    gc.freeze()
