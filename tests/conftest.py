"""Runs `async def` tests without a plugin, and all tests without the user's hub settings."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings

DEVICES = Path("/dev")


def has_gpu() -> bool:
    """Whether torch has a GPU; under WSL the only device file of one is Windows' own."""
    if not (any(DEVICES.glob("nvidia[0-9]*")) or (DEVICES / "dxg").exists()):
        return False
    import torch

    return torch.cuda.is_available()


# The hub's client reads these once, when it is imported.
for name in [
    name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_", "HUGGINGFACE_"))
]:
    del os.environ[name]

# Triton reads this once, at its first import: where torch has no GPU, its kernels run in its interpreter. Only torch
# knows; its import takes seconds, which the tests without kernels save on a host that shows no GPU.
if metadata.version("torch").endswith("+cpu") or not has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# OpenMP reads these once: with a test process on each core, threads that wait for each other take the cores from those
# that work. Tests of threads set their number, in this process or by --cpu-threads, and these sleep while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# gRPC reads this once, see millrace_router/__init__.py.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# A machine that does something else meanwhile is no reason to fail.
settings.register_profile("unhurried", parent=settings.default, deadline=None)
settings.load_profile("unhurried")

# So long that only a test that would never end meets it, however busy the machine is.
ASYNC_TEST_SECONDS = 300


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test on a loop of its own, in debug mode and with a deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    with asyncio.Runner() as runner:
        runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), timeout=ASYNC_TEST_SECONDS))
    return True


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the modules and tests that stay until the end: it took half a second."""
    gc.collect()
    gc.freeze()
