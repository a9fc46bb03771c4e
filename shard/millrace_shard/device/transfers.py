"""Asynchronous copies between host and device: through pinned memory on CUDA, and no copies on CPU.

torch's allocator of pinned memory reuses a buffer only when the copies submitted from it are done, so a buffer may be
freed while its copy is in progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from millrace_shard.arrays import Ints


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """`values` on the device, ready for work that is submitted later."""
    # A copy is needed, since numpy calls a field of one row contiguous whatever its stride is.
    host = torch.from_numpy(values.copy())
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_columns(columns: list[Ints], device: torch.device) -> tuple[Tensor, ...]:
    """Columns int64 of any lengths, by one copy; on CPU the tensors share the memory of `columns`."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(column) for column in columns)
    whole = upload(np.concatenate(columns), device)
    return torch.split(whole, [len(column) for column in columns])


def upload_into(buffer: Tensor, values: NDArray[Any]) -> None:
    """Overwrite `buffer`, contiguous and of the shape and dtype of `values`, after the work submitted so far."""
    host = torch.from_numpy(values)
    pinned = host if buffer.device.type == "cpu" else host.pin_memory()
    buffer.copy_(pinned, non_blocking=True)


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
    if columns[0].device.type == "cpu":
        return list(columns)
    words = [each.view(torch.int32) if each.is_floating_point() else each.int() for each in columns]
    rows = start_download(torch.stack(words)).unbind()
    return [
        row.view(torch.float32) if column.is_floating_point() else row
        for row, column in zip(rows, columns, strict=True)
    ]


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
