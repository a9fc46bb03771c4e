"""Copies of weights from host memory to a device: through two pinned buffers on CUDA, directly on CPU.

A copy from pageable memory, such as a mapped file, passes through small buffers of the driver and waits for each. With
two pinned buffers, the host fills one while the device reads the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

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
    """A Copy without buffers."""
    out.copy_(values)


def copy_to(device: torch.device) -> Copy:
    """The Copy for tensors on `device`."""
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
