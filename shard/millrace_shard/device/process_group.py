"""The ranks of one tensor-parallel model: collectives over torch.distributed, which a single rank skips."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from millrace_shard.device.one_shot import OneShotAllReduce, SharedMemory

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(seconds=120)


class GroupError(RuntimeError):
    """The ranks could not form a group."""


class CollectiveError(GroupError):
    """A collective failed or timed out. The ranks are out of step, so the group is unusable."""


class ProcessGroup:
    """One rank's view of its group. Every method is a collective: all ranks call it, in the same order.

    Collectives raise CollectiveError when another rank is gone or exceeds the timeout.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        if not 0 <= rank < world_size:
            raise GroupError(f"rank {rank} is outside a group of {world_size}")
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._one_shot: OneShotAllReduce | None = None
        self._in_rank_order = False

    @classmethod
    def single(cls) -> ProcessGroup:
        """A group of one rank, whose collectives return their input."""
        return cls(0, 1, torch.device("cpu"))

    @classmethod
    def connect(
        cls,
        rank: int,
        world_size: int,
        *,
        master_addr: str,
        master_port: int,
        device: torch.device,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> ProcessGroup:
        """Wait for all ranks at rank 0's address; the backend is NCCL for CUDA devices, gloo otherwise.

        `timeout` also bounds every later collective. Raises GroupError when ranks are missing.
        """
        group = cls(rank, world_size, device)
        if world_size == 1:
            return group
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                init_method=f"tcp://{master_addr}:{master_port}",
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=device if cuda else None,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            place = f"{master_addr}:{master_port}"
            raise GroupError(
                f"rank {rank} of {world_size} found no group at {place}: {error}"
            ) from error
        return group

    def add_in_rank_order(self) -> None:
        """From now on, add in the order of ranks, so that the sum of an element does not depend on its place.

        A ring starts each part of a tensor at another rank, and the part of an element depends on the number of rows.
        The sum of two numbers is the same in any order, so this changes nothing for two ranks.
        """
        self._in_rank_order = self.world_size > 2

    def use_one_shot(self, memory: SharedMemory) -> None:
        """From now on, sum small tensors through `memory`, if all ranks can share it; else a warning is logged.

        It has no effect, and is logged, where sums are added in the order of ranks.
        """
        if self.world_size == 1:
            return
        if self._in_rank_order:
            logger.info(
                "--one-shot-all-reduce has no effect: with --deterministic on, more than two ranks add in their order"
            )
            return
        one_shot, problem = None, "another rank cannot"
        try:
            one_shot = OneShotAllReduce(memory)
        except RuntimeError as error:
            problem = str(error)
        if self.minimum(int(one_shot is not None)):
            self._one_shot = one_shot
        else:
            logger.warning("all sums go through NCCL, as GPUs cannot share memory: %s", problem)

    def all_reduce(self, t: Tensor) -> Tensor:
        """Sum over the ranks; every rank gets the same bits. `t` may be overwritten."""
        if self.world_size == 1:
            return t
        if self._in_rank_order:
            return self._sum_in_rank_order(t)
        with _as_collective_errors():
            if self._one_shot is not None and self._one_shot.fits(t):
                return self._one_shot(t)
            dist.all_reduce(t)
        return t

    def _sum_in_rank_order(self, t: Tensor) -> Tensor:
        """Gather the parts of all ranks and add them in order; floats are rounded once, at the end."""
        first, *others = self._parts(t)
        total = (
            first.to(torch.promote_types(t.dtype, torch.float32))
            if t.is_floating_point()
            else first
        )
        for part in others:
            total = total + part
        return total.to(t.dtype)

    def all_gather(self, t: Tensor) -> Tensor:
        """The `t` of all ranks, concatenated in the last dimension, rank 0 first."""
        return t if self.world_size == 1 else torch.cat(self._parts(t), dim=-1)

    def _parts(self, t: Tensor) -> list[Tensor]:
        """The `t` of all ranks, by rank."""
        parts = [
            torch.empty_like(t, memory_format=torch.contiguous_format)
            for _ in range(self.world_size)
        ]
        whole = t.contiguous()
        with _as_collective_errors():
            dist.all_gather(parts, whole)
        return parts

    def minimum(self, value: int) -> int:
        """The smallest `value` over all ranks."""
        if self.world_size == 1:
            return value
        smallest = torch.tensor(value, dtype=torch.int64, device=self.device)
        with _as_collective_errors():
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest)

    def close(self) -> None:
        """Leave the group; collectives that other ranks are running fail."""
        if self.world_size > 1:
            dist.destroy_process_group()


@contextmanager
def _as_collective_errors() -> Iterator[None]:
    """Convert torch's errors: gloo raises RuntimeError, NCCL a subclass of it."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"a collective of the ranks failed: {error}") from error
