"""Adapters on the ranks of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.models.adapters import load_adapted
from millrace_testing.models.models import Run


@dataclass(frozen=True)
class AdaptedJob:
    """The work of every rank: prompts with their adapter slots, over a checkpoint and a cache folder."""

    folder: Path
    cache: Path
    digests: tuple[str, ...]
    prompts: list[list[int]]
    slots: list[int]
    num_tokens: int
    chunk: int | None = None


def generate_on_a_rank(group: ProcessGroup, jobs: list[AdaptedJob]) -> list[list[Run]]:
    """The sequences of each job."""
    kernels = PlainKernels(deterministic=True)
    found = []
    for job in jobs:
        with torch.inference_mode():
            adapted = load_adapted(job.folder, job.cache, kernels, digests=job.digests, group=group)
            found.append(
                adapted.driver.generate(
                    job.prompts, job.num_tokens, chunk=job.chunk, adapters=job.slots
                )
            )
    return found
