"""All-reduce of small tensors in one kernel: every rank reads the tensors of all ranks from shared memory.

The partial sums of a decode step have at most a few hundred kilobytes, for which the cost of a ring or a tree is its
latency. The ranks add in the order of their numbers, so all get the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

MAX_BYTES = 256 * 1024
"""Above this size, reading the whole tensor of every rank costs more than the saved latency."""
ALIGNMENT = 16
"""Bytes that a thread reads at a time."""
DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that torch's operator supports."""


class SharedMemory(Protocol):
    """Memory that every rank of a group can read."""

    def buffer(self, num_bytes: int) -> Tensor:
        """The rank's own part, [num_bytes] uint8. A collective. Raises RuntimeError where memory cannot be shared."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum of `part`, a view of the buffer, over the ranks, as a new tensor; all ranks have read it afterwards."""


class SymmetricMemory:
    """torch's symmetric memory between the GPUs of one host."""

    def __init__(self, device: torch.device) -> None:
        """Use the default group. A collective."""
        self._device = device
        world = dist.group.WORLD
        assert world is not None, "the group is connected first"
        self._group_name = world.group_name

    def buffer(self, num_bytes: int) -> Tensor:
        buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
        symmetric_memory.rendezvous(buffer, self._group_name)
        return buffer

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum by torch's operator on the current stream."""
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._group_name)
        return total


class OneShotAllReduce:
    """All-reduce of tensors that fit, which follows from size and dtype, so all ranks decide alike."""

    def __init__(self, memory: SharedMemory) -> None:
        """Allocate the buffer. A collective. Raises RuntimeError where ranks cannot share memory."""
        self._memory = memory
        self._buffer = memory.buffer(MAX_BYTES)

    def fits(self, t: Tensor) -> bool:
        """Whether `t` has a supported dtype and size."""
        return t.dtype in DTYPES and 0 < t.nbytes <= MAX_BYTES and t.nbytes % ALIGNMENT == 0

    def __call__(self, t: Tensor) -> Tensor:
        """Sum of `t`, which fits, over the ranks, as a new tensor of its shape."""
        part = self._buffer.view(t.dtype)[: t.numel()].view(t.shape)
        part.copy_(t)
        return self._memory.all_reduce(part)
