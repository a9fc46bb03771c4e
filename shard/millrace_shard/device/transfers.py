"""Copies between host and device that nobody waits for: from and to pinned memory on CUDA, nothing at all on CPU.

torch's allocator of pinned memory hands a buffer out again only when the copies that were submitted from it are done,
so a buffer may be let go while its copy is under way.
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
    """`values` on the device, at the time when work submitted from now on runs."""
    # A copy, since numpy calls a field of one row contiguous whatever its stride.
    host = torch.from_numpy(values.copy())
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def upload_columns(columns: list[Ints], device: torch.device) -> tuple[Tensor, ...]:
    """Columns of any lengths in one copy, int64; on CPU they are not to be changed before these are let go."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(column) for column in columns)
    whole = upload(np.concatenate(columns), device)
    return torch.split(whole, [len(column) for column in columns])


def upload_into(buffer: Tensor, values: NDArray[Any]) -> None:
    """Overwrite `buffer`, contiguous and of their shape and dtype, once the work submitted so far has run."""
    host = torch.from_numpy(values)
    pinned = host if buffer.device.type == "cpu" else host.pin_memory()
    buffer.copy_(pinned, non_blocking=True)


def start_download(values: Tensor) -> Tensor:
    """A copy on the host that is under way on CUDA, and `values` themselves on CPU."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def start_downloads(columns: Sequence[Tensor]) -> list[Tensor]:
    """As `start_download`, of columns of one length [n] of int64, float32 or bool; on CUDA by one copy.

    Integers may come out as int32, which holds them, and flags as integers.
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
    """`values`, whose work is known to be done, on the host now, without queueing behind what was submitted since."""
    if values.device.type == "cpu":
        return values.numpy()
    stream = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        return values.cpu().numpy()


def is_synchronous(device: torch.device) -> bool:
    """Whether the host may read from `device` while it launches a step: on CPU, where nothing is launched ahead."""
    return device.type == "cpu"
