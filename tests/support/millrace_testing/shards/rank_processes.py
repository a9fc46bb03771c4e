"""Ranks of a group as processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace_shard.device.process_group import ProcessGroup
from millrace_testing.launcher.deployment import kept_port
from millrace_testing.shards.forked import forking


def part_of(rank: int) -> Tensor:
    """The addend of a rank, [64, 33]."""
    return torch.randn(64, 33, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)


def sums_by_rows(group: ProcessGroup, rows: Sequence[int]) -> dict[str, Any]:
    """Sums, in rank order, of the first n rows of the ranks' parts, by n."""
    group.add_in_rank_order()
    mine = part_of(group.rank)
    return {
        "float32": {count: group.all_reduce(mine[:count].clone()) for count in rows},
        "bfloat16": {count: group.all_reduce(mine[:count].bfloat16()) for count in rows},
        "integers": group.all_reduce(torch.tensor([1, 1])),
    }


def run_ranks(
    folder: Path, world_size: int, work: Callable[[ProcessGroup, Any], Any], argument: Any
) -> list[Any]:
    """Run `work` in the `world_size` processes of a group; returns the result of each rank."""
    with kept_port() as port:
        ranks = [
            forking().Process(target=_rank, args=(rank, world_size, port, folder, work, argument))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=100)
            if process.exitcode != 0:
                for other in ranks:
                    other.kill()
                raise RuntimeError(f"a rank ended with {process.exitcode}")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    work: Callable[[ProcessGroup, Any], Any],
    argument: Any,
) -> None:
    torch.set_num_threads(1)
    group = ProcessGroup.connect(
        rank, world_size, master_addr="127.0.0.1", master_port=port, device=torch.device("cpu")
    )
    torch.save(work(group, argument), folder / f"rank{rank}.pt")
    group.close()
