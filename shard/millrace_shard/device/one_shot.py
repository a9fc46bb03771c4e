"""All-reduce of small tensors in one kernel: every rank reads what all have put into memory they share.

A decode's partial sums are a few hundred kilobytes at most, where a ring or a tree costs its latency and nothing else.
The ranks add in the order of their numbers, so each gets the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

MAX_BYTES = 256 * 1024
"""Above it, reading every rank's whole tensor costs more than the latency saved."""
ALIGNMENT = 16
"""Bytes a thread reads at a time."""
DTYPES = (torch.bfloat16, torch.float32)
"""What torch's operator adds."""


class SharedMemory(Protocol):
    """Memory that every rank of a group can read."""

    def buffer(self, num_bytes: int) -> Tensor:
        """The part of one rank, [num_bytes] uint8. A collective. Raises RuntimeError where ranks cannot share it."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum over the ranks of `part`, a view of the buffer, as a new tensor; all have read it when this is done."""


class SymmetricMemory:
    """torch's symmetric memory between the GPUs of one host."""

    def __init__(self, device: torch.device) -> None:
        """For the default group, whose ranks all make one."""
        self._device = device
        world = dist.group.WORLD
        assert world is not None, "the group is connected first"
        self._group_name = world.group_name

    def buffer(self, num_bytes: int) -> Tensor:
        """Allocate and exchange addresses."""
        buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
        symmetric_memory.rendezvous(buffer, self._group_name)
        return buffer

    def all_reduce(self, part: Tensor) -> Tensor:
        """By torch's operator, on the current stream."""
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._group_name)
        return total


class OneShotAllReduce:
    """Sums what fits. Whether a tensor does follows from its size and dtype, so all ranks decide alike."""

    def __init__(self, memory: SharedMemory) -> None:
        """A collective. Raises RuntimeError where ranks cannot share memory."""
        self._memory = memory
        self._buffer = memory.buffer(MAX_BYTES)

    def fits(self, t: Tensor) -> bool:
        """Whether `t` is small enough, and of a size and type that can be added."""
        return t.dtype in DTYPES and 0 < t.nbytes <= MAX_BYTES and t.nbytes % ALIGNMENT == 0

    def __call__(self, t: Tensor) -> Tensor:
        """Sum over the ranks of `t`, which fits, as a new tensor of its shape."""
        part = self._buffer.view(t.dtype)[: t.numel()].view(t.shape)
        part.copy_(t)
        return self._memory.all_reduce(part)
