"""Copies between host and device: asynchronous through pinned memory on CUDA, and no copies on CPU.

torch's allocator of pinned memory reuses a buffer only when the copies submitted from it are done, so a buffer may be
freed while its copy is in progress.

A copy from pageable memory, such as a mapped file, passes through small buffers of the driver and waits for each. With
two pinned buffers, the host fills one while the device reads the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints


def pinned(host: Tensor, device: torch.device) -> Tensor:
    """A copy of `host` that `device` reads at any time; every copy to the device starts with one."""
    return host if device.type == "cpu" else host.pin_memory()


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` on the device, ready for work that is submitted later."""
    # A copy is needed, since numpy calls a field of one row contiguous whatever its stride is.
    host = torch.from_numpy(values.copy())
    if is_synchronous(device):
        return host
    return pinned(host, device).to(device, non_blocking=True)


def upload_columns(columns: Sequence[Ints], device: torch.device) -> tuple[Tensor, ...]:
    """Columns int64 of any lengths, by one copy; on CPU the tensors share the memory of `columns`."""
    if is_synchronous(device):
        return tuple(torch.from_numpy(column) for column in columns)
    whole = pinned(torch.from_numpy(np.concatenate(columns)), device)
    return _split(whole.to(device, non_blocking=True), columns)


def upload_into(buffer: Tensor, values: NDArray[Any]) -> None:
    """Overwrite `buffer`, contiguous and of the shape and dtype of `values`, after the work submitted so far."""
    buffer.copy_(pinned(torch.from_numpy(values), buffer.device), non_blocking=True)


def upload_columns_into(buffer: Tensor, columns: Sequence[Ints]) -> tuple[Tensor, ...]:
    """Overwrite the beginning of `buffer` [n] int64 with columns of any lengths, by one copy; the columns there."""
    whole = np.concatenate(columns)
    upload_into(buffer[: len(whole)], whole)
    return _split(buffer[: len(whole)], columns)


def _split(whole: Tensor, columns: Sequence[Ints]) -> tuple[Tensor, ...]:
    return torch.split(whole, [len(column) for column in columns])


def start_download(values: Tensor) -> Tensor:
    """A host copy of `values`, which is still in progress on CUDA; on CPU, `values` themselves."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def start_downloads(columns: Sequence[Tensor]) -> list[Tensor]:
    """Host copies of columns [n] int64, float32 or bool, as by `start_download`; on CUDA by one copy.

    On CUDA, integers, which must fit, and flags become int32.
    """
    if is_synchronous(columns[0].device):
        return list(columns)
    rows = start_download(as_words(columns)).unbind()
    return [
        row.view(torch.float32) if column.is_floating_point() else row
        for row, column in zip(rows, columns, strict=True)
    ]


def start_download_of_words(words: Tensor) -> list[Tensor]:
    """The same as `start_downloads` of ids, log probabilities and flags, from `as_words`, which may be overwritten."""
    host = words.clone() if words.device.type == "cpu" else start_download(words)
    ids, logprobs, flags = host.unbind()
    return [ids, logprobs.view(torch.float32), flags]


def as_words(columns: Sequence[Tensor]) -> Tensor:
    """Columns [n] int64, float32 or bool as [columns, n] int32; integers must fit."""
    words = [each.view(torch.int32) if each.is_floating_point() else each.int() for each in columns]
    return torch.stack(words)


def download_on_side_stream(values: Tensor) -> NDArray[Any]:
    """`values`, which must be computed already, on the host; the copy does not wait for work submitted later."""
    if values.device.type == "cpu":
        return values.numpy()
    stream = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        host = start_download(values)
        done.record()
    done.synchronize()
    return host.numpy()


def is_synchronous(device: torch.device) -> bool:
    """Whether work on `device` is done when its call returns, so that the host may read results at once: on CPU."""
    return device.type == "cpu"


BUFFER_BYTES = 64 << 20
NUM_BUFFERS = 2

Copy = Callable[[Tensor, Tensor], None]
"""Overwrites a tensor on the device with a host tensor of its shape, which has been read when the call returns."""


class Pending(Protocol):
    """A copy that is in progress."""

    def synchronize(self) -> None:
        """Wait until the copy is done."""


Send = Callable[[Tensor, Tensor], Pending]
"""Starts a copy to a tensor on the device from a tensor in pinned memory."""


class StagedCopies:
    """Copies in pieces, each through one of a few buffers, whose turns are fixed."""

    def __init__(self, buffers: list[Tensor], send: Send) -> None:
        """`buffers` [bytes] uint8 have equal sizes and are in memory from which `send` reads at any time."""
        self._num_bytes = buffers[0].numel()
        self._free = deque(buffers)
        self._sent: deque[tuple[Tensor, Pending]] = deque()
        self._send = send

    def __call__(self, out: Tensor, values: Tensor) -> None:
        """Overwrite `out` on the device with `values` of its shape, rounded to its dtype; see Copy.

        Work that is submitted to the device later reads the new values.
        """
        if out.numel() == 0:
            return
        row_bytes = out.nbytes // out.shape[0] if out.dim() else out.nbytes
        if not out.dim() or row_bytes > self._num_bytes:
            out.copy_(values)
            return
        rows = self._num_bytes // row_bytes
        for piece, source in zip(torch.split(out, rows), torch.split(values, rows), strict=True):
            buffer = self._next_buffer()
            staged = buffer[: piece.nbytes].view(out.dtype).view(piece.shape)
            staged.copy_(source)
            self._sent.append((buffer, self._send(piece, staged)))

    def _next_buffer(self) -> Tensor:
        """A buffer that no copy reads; waits for the oldest copy if all are in use."""
        if self._free:
            return self._free.popleft()
        buffer, pending = self._sent.popleft()
        pending.synchronize()
        return buffer


def copy_directly(out: Tensor, values: Tensor) -> None:
    out.copy_(values)


def copy_to(device: torch.device) -> Copy:
    if device.type != "cuda":
        return copy_directly
    buffers = [
        torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)
    ]
    return StagedCopies(buffers, _send)


def _send(out: Tensor, staged: Tensor) -> Pending:
    out.copy_(staged, non_blocking=True)
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
