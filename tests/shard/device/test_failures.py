"""Classification of errors by their messages, without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch

from millrace_shard.device.failures import clear_frames, is_lost, is_out_of_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("ncclUnhandledCudaError\nFailed to CUDA calloc async 608 bytes"), True),
        (RuntimeError("ncclUnhandledCudaError\nFailed to CUDA malloc 8388608 bytes"), True),
        (RuntimeError("unhandled cuda error\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("unhandled cuda error\nCuda failure 1 'invalid argument'"), False),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), False),
        (RuntimeError("out of resource: shared memory, Required: 300000"), False),
        (ILLEGAL, False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_allocators_say_it_each_in_their_own_words(error: Exception, *, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [(None, False), (ILLEGAL, True), (torch.OutOfMemoryError("CUDA out of memory"), False)],
)
def test_a_device_that_cannot_be_waited_for_is_lost(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch, *, expected: bool
) -> None:
    asked: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        asked.append(device)
        if error is not None:
            raise error

    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    assert is_lost(CUDA) is expected
    assert asked == [CUDA]
    assert not is_lost(CPU)
    assert asked == [CUDA]


def fails(held: list[weakref.ref[torch.Tensor]]) -> None:
    tensor = torch.empty(10)
    held.append(weakref.ref(tensor))
    raise ValueError(tensor.shape)


def from_another(held: list[weakref.ref[torch.Tensor]]) -> None:
    try:
        fails(held)
    except ValueError:
        try:
            fails(held)
        except ValueError as error:
            raise RuntimeError from error


def from_itself(held: list[weakref.ref[torch.Tensor]]) -> None:
    try:
        fails(held)
    except ValueError as error:
        raise error from error


@pytest.mark.parametrize(("call", "count"), [(fails, 1), (from_another, 2), (from_itself, 1)])
def test_no_frame_of_an_error_or_its_causes_holds_a_tensor(
    call: Callable[[list[weakref.ref[torch.Tensor]]], None], count: int
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call(held)
    assert len(held) == count
    assert all(ref() is not None for ref in held)
    clear_frames(caught.value)
    assert [ref() for ref in held] == [None] * count
