"""All-reduce in one kernel, through memory of all ranks that each can read, in place of a ring or a tree.

The partial sums of a decode step have at most a few hundred kilobytes, for which the cost of a ring is its latency:
every rank reads and adds the tensors of all ranks. Of larger tensors each rank adds a part, and reads the other sums;
where the switch between GPUs adds, it does. All ranks get the same bits.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

MAX_BYTES = 8 << 20
"""Above this size NCCL's rings are as fast."""
ONE_SHOT_BYTES = 256 * 1024
"""Above this size, reading the whole tensor of every rank takes longer than reading a part of each twice."""
READ_BYTES = 1 << 20
"""The most that a rank reads of all others in one shot, which more than four ranks reach first."""
ALIGNMENT = 16
"""Bytes that a thread reads at a time."""
DTYPES = (torch.bfloat16, torch.float32)
"""The dtypes that torch's operators support."""
TRIAL_BYTES = (ALIGNMENT, MAX_BYTES)
"""Sizes of a trial: each way of adding is tried."""


class SharedMemory(Protocol):
    """Memory that every rank of a group can read."""

    def buffer(self, num_bytes: int) -> Tensor:
        """The rank's own part, [num_bytes] uint8. A collective. Raises RuntimeError where memory cannot be shared."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum of `part`, a view of the buffer, over the ranks, as a new tensor; all ranks have read it afterwards.

        `part` may be overwritten.
        """


class SymmetricMemory:
    """torch's symmetric memory between the GPUs of one host."""

    def __init__(self, device: torch.device) -> None:
        """Use the default group. A collective."""
        self._device = device
        world = dist.group.WORLD
        assert world is not None, "the group is connected first"
        self._group_name = world.group_name
        self._most_one_shot = most_in_one_shot(world.size())
        self._has_multicast = False

    def buffer(self, num_bytes: int) -> Tensor:
        buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=self._device)
        handle = symmetric_memory.rendezvous(buffer, self._group_name)
        self._has_multicast = bool(handle.multicast_ptr)
        return buffer

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum by torch's operators on the current stream."""
        operators, name = torch.ops.symm_mem, self._group_name
        if part.nbytes <= self._most_one_shot:
            total: Tensor = operators.one_shot_all_reduce(part, "sum", name)
            return total
        if self._has_multicast:
            operators.multimem_all_reduce_(part, "sum", name)
        else:
            operators.two_shot_all_reduce_(part, "sum", name)
        return part.clone()


def most_in_one_shot(world_size: int) -> int:
    """Bytes of the largest tensor of which each rank reads all parts."""
    return min(ONE_SHOT_BYTES, READ_BYTES // world_size // ALIGNMENT * ALIGNMENT)


class OneShotAllReduce:
    """All-reduce of tensors that fit, which follows from size and dtype, so all ranks decide alike."""

    def __init__(self, memory: SharedMemory, world_size: int) -> None:
        """Allocate the buffer. A collective. Raises RuntimeError where ranks cannot share memory."""
        self._memory = memory
        self._world_size = world_size
        self._buffer = memory.buffer(MAX_BYTES)

    def fits(self, t: Tensor) -> bool:
        """Whether `t` has a supported dtype and size: large tensors are cut into a part for each rank."""
        is_large = t.nbytes > most_in_one_shot(self._world_size)
        whole = ALIGNMENT * self._world_size if is_large else ALIGNMENT
        return t.dtype in DTYPES and 0 < t.nbytes <= MAX_BYTES and t.nbytes % whole == 0

    def problem(self, rank: int) -> str | None:
        """What is wrong with the sums of a trial; None if they are right. A collective."""
        wrong: str | None = None
        for dtype in DTYPES:
            for num_bytes in TRIAL_BYTES:
                size = num_bytes // self._world_size // ALIGNMENT * ALIGNMENT * self._world_size
                count = max(size, ALIGNMENT) // dtype.itemsize
                # Integers whose sums are exact in each dtype.
                own = torch.arange(count, device=self._buffer.device) % 8 + rank
                ranks = self._world_size * (self._world_size - 1) // 2
                expected = (own - rank) * self._world_size + ranks
                # The other ranks go on with their trial, whatever the result is here.
                if not torch.equal(self(own.to(dtype)), expected.to(dtype)):
                    wrong = f"a sum of {count} numbers of {dtype} is wrong"
        return wrong

    def __call__(self, t: Tensor) -> Tensor:
        """Sum of `t`, which fits, over the ranks, as a new tensor of its shape."""
        part = self._buffer.view(t.dtype)[: t.numel()].view(t.shape)
        part.copy_(t)
        return self._memory.all_reduce(part)
