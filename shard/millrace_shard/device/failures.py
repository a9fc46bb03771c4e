"""Classification of device errors: out of memory, a lost device."""

from __future__ import annotations

import subprocess
import sys
import traceback

import torch

NO_MEMORY = (
    "can't allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "cudaErrorMemoryAllocation",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # NCCL.
    "Failed to CUDA calloc",
    "Failed to CUDA malloc",
    "Cuda failure 'out of memory'",
    "Cuda failure 2 'out of memory'",
)
"""Texts of the RuntimeErrors by which CPU allocators, CUDA and its libraries report that memory is exhausted."""


def kernel_failures() -> tuple[type[Exception], ...]:
    """Errors of compilation and launch if the GPU, its driver or the host's compiler is unsuitable.

    Those of Triton belong to them once Triton is imported.
    """
    triton = sys.modules.get("triton.errors")
    own = () if triton is None else (triton.TritonError,)
    # Triton asserts that the host has the driver's library.
    return (RuntimeError, OSError, AssertionError, subprocess.SubprocessError, *own)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that the device or the host is out of memory; many allocators say so only in the text."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def is_lost(device: torch.device) -> bool:
    """Whether `device` is unusable: some errors of a GPU persist until the process ends."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False


def clear_frames(error: BaseException) -> None:
    """Clear the frames in the tracebacks of `error` and its causes, which keep tensors alive."""
    errors: list[BaseException | None] = [error]
    seen = set()
    while errors:
        # `raise error from error` makes an error its own cause.
        if (each := errors.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            errors += [each.__cause__, each.__context__]
