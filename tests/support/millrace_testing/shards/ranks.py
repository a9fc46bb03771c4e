"""Ranks of a tensor-parallel group as processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from millrace_shard.device.one_shot import MAX_BYTES
from millrace_shard.device.process_group import CollectiveError, ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_shard.models.load import load_model
from millrace_testing.models.models import Driver, Run
from millrace_testing.shards.rank_processes import run_ranks as run_ranks


@dataclass(frozen=True)
class Job:
    """The work of every rank on a checkpoint."""

    folder: Path
    prompts: list[list[int]]
    num_tokens: int
    chunk: int | None = None


class GlooMemory:
    """The shared memory of ranks on CPU, for which gloo exchanges the parts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def buffer(self, num_bytes: int) -> Tensor:
        """This rank's buffer."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def all_reduce(self, part: Tensor) -> Tensor:
        """A new tensor; `part` is unchanged."""
        self.sizes.append(part.nbytes)
        total = part.clone()
        dist.all_reduce(total)
        return total


class NoMemory(GlooMemory):
    """GPUs that cannot read each other's memory."""

    def buffer(self, num_bytes: int) -> Tensor:
        """Raise torch's error."""
        raise RuntimeError("no peer access")


def generate(job: Job, group: ProcessGroup) -> list[Run]:
    """Generate on this rank."""
    kernels = PlainKernels(deterministic=False)
    model = load_model(
        job.folder,
        dtype=torch.float32,
        kernels=kernels,
        group=group,
        device=torch.device("cpu"),
    )
    driver = Driver(model, kernels, dtype=torch.float32)
    return driver.generate(job.prompts, job.num_tokens, chunk=job.chunk)


def work_of_a_rank(group: ProcessGroup, jobs: list[Job]) -> tuple[dict[str, Any], list[list[Run]]]:
    """Call each collective with values that differ by rank, run all jobs, and then leave rank 0 alone."""
    mine = torch.arange(4.0).view(2, 2) + 10 * group.rank
    results: dict[str, Any] = {
        "sum": group.all_reduce(mine.clone()),
        "gathered": group.all_gather(mine.t()),
        "logits": group.all_gather_logits(mine.t().bfloat16(), 3),
        "bf16": group.all_reduce(torch.ones(3, dtype=torch.bfloat16)),
        "minimum": group.minimum(7 - group.rank),
    }
    runs = [generate(job, group) for job in jobs]
    results["one_shot"] = _one_shot_sums(group)
    if group.rank == 0:
        results["failed"] = _failing_collectives(group)
    return results, runs


def _one_shot_sums(group: ProcessGroup) -> dict[str, Any]:
    """Sums of tensors that fit the shared memory and of larger ones, and the sums that used it."""
    mine = torch.arange(8.0) + 10 * group.rank
    found: dict[str, Any] = {}
    # Rank 1 cannot share its memory at first.
    refused = NoMemory() if group.rank == 1 else GlooMemory()
    group.use_one_shot(refused)
    found["refused"] = group.all_reduce(mine.clone()), refused.sizes
    memory = GlooMemory()
    group.use_one_shot(memory)
    found["small"] = group.all_reduce(mine.clone())
    found["again"] = group.all_reduce(mine.view(2, 4) * 2)
    found["bf16"] = group.all_reduce(mine.bfloat16())
    found["odd"] = group.all_reduce(mine[:3].clone())
    found["int"] = group.all_reduce(mine.long())
    found["large"] = group.all_reduce(mine.repeat(MAX_BYTES // 32 + 1))[-8:]
    found["limit"] = group.all_reduce(mine.repeat(MAX_BYTES // 32))[-8:]
    found["sizes"] = memory.sizes
    return found


def _failing_collectives(group: ProcessGroup) -> list[str]:
    """Collectives that raise CollectiveError after the other rank has left."""
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(torch.ones(2)),
        "all_gather": lambda: group.all_gather(torch.ones(2)),
        "minimum": lambda: group.minimum(1),
    }
    failed = []
    for name, call in calls.items():
        try:
            call()
        except CollectiveError:
            failed.append(name)
    return failed
