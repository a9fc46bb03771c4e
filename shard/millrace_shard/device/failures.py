"""What an error of the device tells: whether memory ended, whether the device is lost, what it still holds."""

from __future__ import annotations

import traceback

import torch

NO_MEMORY = (
    "can't allocate memory",
    "std::bad_alloc",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""How allocators on CPU, and of CUDA's libraries, put it in a RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left; most allocators but torch's own for CUDA say it in words."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def is_lost(device: torch.device) -> bool:
    """Whether nothing can run on `device` any more: some errors of a GPU stay until its process ends."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return not is_out_of_memory(error)
    return False


def clear_frames(error: BaseException) -> None:
    """Let go of what the frames that `error` and its causes went through hold: tensors, while memory is short."""
    errors: list[BaseException | None] = [error]
    seen = set()
    while errors:
        # `raise error from error` makes an error its own cause.
        if (each := errors.pop()) is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)
            errors += [each.__cause__, each.__context__]
