"""Classification of errors by their messages, without a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from millrace_shard.device.failures import clear_frames, is_lost, is_out_of_memory
from millrace_shard.device.resources import available_memory

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
def test_out_of_memory_is_recognised_in_the_words_of_each_allocator(
    error: Exception, *, expected: bool
) -> None:
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


MEMINFO = "MemTotal:       16000000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".", 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def meminfo(folder: Path) -> Path:
    path = folder / "meminfo"
    path.write_text(MEMINFO)
    return path


def test_without_a_container_the_kernels_word_counts(tmp_path: Path) -> None:
    result = available_memory(meminfo=meminfo(tmp_path), cgroup=tmp_path / "none")
    assert result == 8_000_000 * 1024


def test_a_containers_limit_counts_when_it_is_nearer(tmp_path: Path) -> None:
    group = write(
        tmp_path,
        memory_max="4000000\n",
        memory_current="3000000\n",
        memory_stat="inactive_file 500000\n",
    )
    assert available_memory(meminfo=meminfo(tmp_path), cgroup=group) == 1_500_000
    write(tmp_path, memory_max="max\n")
    assert available_memory(meminfo=meminfo(tmp_path), cgroup=group) == 8_000_000 * 1024


def test_version_1_control_groups_limit_the_memory(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text("4000000\n")
    (folder / "memory.usage_in_bytes").write_text("1000000\n")
    (folder / "memory.stat").write_text("cache 9\ntotal_inactive_file 200000\n")
    assert available_memory(meminfo=meminfo(tmp_path), cgroup=tmp_path) == 3_200_000


def test_without_meminfo_physical_memory_counts(tmp_path: Path) -> None:
    assert available_memory(meminfo=tmp_path / "none", cgroup=tmp_path) > 2**20
