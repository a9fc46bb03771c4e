"""Drives an engine over the fake model as a router would: numbers steps, grows block tables, keeps what comes back."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from millrace_shard.arrays import Ints
from millrace_shard.batch.sequence import Sequence
from millrace_shard.batch.step import (
    BatchChange,
    Filter,
    Forward,
    Open,
    Step,
    StepFailure,
    StepReply,
    StepResult,
    Work,
)
from millrace_shard.device.process_group import ProcessGroup
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.kv_capacity import WarmupRequest
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.engine.warmup import MemoryLimits
from millrace_shard.kernels.kv_store import KVStore
from millrace_shard.kernels.scores import SamplingKernels
from millrace_shard.model_runner.runner import StepRunner
from millrace_shard.speculation.loading import Speculation
from millrace_testing.engines.fake_engine import BLOCK_SIZE, FakeKernels, FakeModel, fake_kernels

PROMPT = [5, 9, 2, 44, 17, 3]
WARMUP = WarmupRequest(max_batch_prefill_tokens=32, max_batch_size=6, max_concurrent_requests=6)
Admitted = tuple[Sequence, list[tuple[int, int]]]


class Driver:
    """Numbers steps, grows block tables, and keeps what came back."""

    def __init__(
        self,
        *,
        overlap: bool = False,
        group: ProcessGroup | None = None,
        speculation: Speculation | None = None,
        sampling: SamplingKernels | None = None,
        kv_store: KVStore | None = None,
    ) -> None:
        self.model = FakeModel()
        self.kernels = FakeKernels()
        self.kernels.sampling = sampling
        self.engine = Engine(
            limits=MemoryLimits(kv_memory=64 * BLOCK_SIZE * 8),
            device=torch.device("cpu"),
            cpu_threads=1,
            overlap=overlap,
        )
        self.engine.attach(
            LoadedModel(
                model=self.model,
                kernels=fake_kernels(self.kernels),
                group=group or ProcessGroup.single(),
                device=torch.device("cpu"),
                dtype=torch.float32,
                speculation=speculation,
                kv_store=kv_store,
            )
        )
        self.engine.start()
        self.epoch = 100
        self.number = 0
        self.free = list(range(1, 64))

    def warm_up(self) -> None:
        self.engine.warm_up(WARMUP).result(30)
        self.model.batches.clear()
        self.kernels.zeroed.clear()

    @property
    def runner(self) -> StepRunner:
        """The engine's step runner."""
        warmed_up = self.engine._warmed_up
        assert warmed_up is not None
        return warmed_up.runner

    def opening(self, life: int = 0) -> Step:
        self.epoch += 1
        self.number = 0
        return Step(self.epoch, 0, Open(life))

    def open(self, life: int = 0) -> StepReply:
        return self.engine.step(self.opening(life)).result(30)

    def send(self, work: Work) -> Future[StepReply]:
        self.number += 1
        return self.engine.step(Step(self.epoch, self.number, work))

    def run(self, work: Work) -> StepResult:
        outcome = self.send(work).result(30).outcome
        assert isinstance(outcome, StepResult), outcome
        return outcome

    def fail(self, work: Work) -> StepFailure:
        outcome = self.send(work).result(30).outcome
        assert isinstance(outcome, StepFailure), outcome
        return outcome

    def admit(
        self, slot: int, ids: list[int] = PROMPT, *, room: int = 8, **fields: Any
    ) -> Admitted:
        """Sequence and blocks for its prompt and `room` tokens more."""
        blocks = -(-(len(ids) + room) // BLOCK_SIZE)
        sequence = Sequence(
            slot=slot, request_id=slot + 1000, input_ids=np.array(ids, dtype=np.int64), **fields
        )
        return sequence, [(slot, self.free.pop(0)) for _ in range(blocks)]


def forward(
    *admitted: Admitted,
    chunks: Iterable[tuple[int, int]] = (),
    decodes: Iterable[int] = (),
    dropped: Iterable[int] = (),
    grown: Iterable[tuple[int, int]] = (),
) -> Forward:
    chunks = list(chunks)
    grown = [*grown, *(pair for _, pairs in admitted for pair in pairs)]
    return Forward(
        change=BatchChange(
            dropped_slots=ints(dropped),
            admitted=tuple(sequence for sequence, _ in admitted),
            grown_slots=ints(slot for slot, _ in grown),
            grown_blocks=ints(block for _, block in grown),
        ),
        chunk_slots=ints(slot for slot, _ in chunks),
        chunk_tokens=ints(count for _, count in chunks),
        decode_slots=ints(decodes),
    )


def ints(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)


def tokens(result: StepResult) -> dict[int, int]:
    return dict(zip(result.slots.tolist(), result.ids.tolist(), strict=True))


def generate(driver: Driver, slot: int, count: int, **fields: Any) -> list[int]:
    """A sequence alone, from admission to `count` tokens, then dropped."""
    admitted = driver.admit(slot, room=count + 1, **fields)
    ids = admitted[0].input_ids
    found = [tokens(driver.run(forward(admitted, chunks=[(slot, len(ids))])))[slot]]
    found += [tokens(driver.run(forward(decodes=[slot])))[slot] for _ in range(count - 1)]
    driver.run(Filter(ints([slot])))
    driver.free += [block for _, block in admitted[1]]
    return found
