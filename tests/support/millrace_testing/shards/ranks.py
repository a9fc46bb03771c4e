"""Ranks of a tensor-parallel group as processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from millrace_shard.device import process_group
from millrace_shard.device.one_shot import MAX_BYTES, ONE_SHOT_BYTES
from millrace_shard.device.process_group import CollectiveError, ProcessGroup
from millrace_shard.kernels.plain import PlainKernels
from millrace_testing.engines.steps import SAMPLING, Stepper, beside
from millrace_testing.launcher.deployment import kept_port
from millrace_testing.models.models import Run, prompt_of, read_driver, read_model

PRELOADED = [
    "millrace_testing.shards.poison_shard",
    "millrace_shard.commands.serve",
    "millrace_testing.shards.ranks",
]

Program = Callable[[Sequence[str]], int]


@cache
def forking() -> ForkServerContext:
    """The multiprocessing context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    path = os.pathsep.join(filter(None, sys.path))
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


class Forked:
    """A program in its own process, with some methods of `subprocess.Popen`."""

    def __init__(
        self,
        program: Program,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the program with a umask of 0, so that it must set private modes itself."""
        self._output = NamedTemporaryFile("r")  # noqa: SIM115
        self._process: ForkServerProcess = forking().Process(
            target=_run, args=(program, list(arguments), self._output.name, dict(environment or {}))
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """None while the process runs, and -N after signal N ended it, as in `Popen`."""
        return self._process.exitcode

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the running process."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process if it runs, and delete its output."""
        self._process.kill()
        self._process.join()
        self._output.close()

    def communicate(self, timeout: float) -> str:
        """The output of the ended process on stdout and stderr; raises TimeoutError after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"it runs on after {timeout} s")
        return self._output.read()


def _run(
    program: Program, arguments: Sequence[str], output: str, environment: Mapping[str, str]
) -> None:
    from millrace_shard import process

    with Path(output).open("ab") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    os.environ.update(environment)
    os.umask(0)
    # The module recorded its value at import, in the server.
    vars(process)["PARENT"] = os.getppid()
    sys.exit(program(arguments))


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
    group = ProcessGroup(rank, world_size, torch.device("cpu"))
    group.join("127.0.0.1", port)
    torch.save(work(group, argument), folder / f"rank{rank}.pt")
    group.close()


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


class WrongSums(GlooMemory):
    """GPUs whose sums lack something."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Less than the sum."""
        return super().all_reduce(part) - 1


def generate(job: Job, group: ProcessGroup) -> list[Run]:
    """Generate on this rank."""
    driver = read_driver(job.folder, PlainKernels(deterministic=False), group=group)
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
    with NamedTemporaryFile("w") as boot_id:
        boot_id.write(f"{group.rank + 1}" * 32)
        boot_id.flush()
        far = GlooMemory()
        with mock.patch.object(process_group, "BOOT_ID", Path(boot_id.name)):
            group.use_one_shot(far)
        found["far"] = group.all_reduce(mine.clone()), far.sizes
    # Nor are the sums of rank 1 right, later.
    wrong = WrongSums() if group.rank == 1 else GlooMemory()
    group.use_one_shot(wrong, is_requested=False)
    wrong.sizes.clear()
    found["wrong"] = group.all_reduce(mine.clone()), wrong.sizes
    memory = GlooMemory()
    group.use_one_shot(memory)
    found["trial"] = list(memory.sizes)
    memory.sizes.clear()
    found["small"] = group.all_reduce(mine.clone())
    found["again"] = group.all_reduce(mine.view(2, 4) * 2)
    found["bf16"] = group.all_reduce(mine.bfloat16())
    found["odd"] = group.all_reduce(mine[:3].clone())
    found["int"] = group.all_reduce(mine.long())
    found["uneven"] = group.all_reduce(mine.repeat(ONE_SHOT_BYTES // 32 + 1)[:-4])[-8:-4]
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


NUM_STEPS = 6
Outcome = tuple[list[int], list[float]]


def sample_on_a_rank(group: ProcessGroup, folder: Path) -> Outcome:
    """Ids and log probabilities of the checkpoint in `folder`; one row per entry of `SAMPLING`, admitted one by one."""
    kernels = PlainKernels(deterministic=True)
    with torch.inference_mode():
        model = read_model(folder, kernels, group=group)
    stepper = Stepper(model, kernels, dtype=torch.float32)
    results = [
        stepper.run(beside(stepper.admission(slot, prompt_of(9, seed=slot), **fields), range(slot)))
        for slot, fields in enumerate(SAMPLING.values())
    ]
    results += [stepper.decode(range(len(SAMPLING))) for _ in range(NUM_STEPS)]
    ids = [id_ for result in results for id_ in result.ids.tolist()]
    return ids, [score for result in results for score in result.logprobs.tolist()]
