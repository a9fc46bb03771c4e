"""A shard's engine in the router's process: the steps of the wire, handed over without gRPC."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from millrace_proto import generate_pb2 as pb
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import ShardError
from millrace_router.shards.step_result import StepResult, result_from_pb
from millrace_router.shards.wire import (
    Capacity,
    ShardInfo,
    capacity_from_pb,
    info_from_pb,
    open_to_pb,
    plan_to_pb,
)
from millrace_shard.batch.step import StepReply
from millrace_shard.device.pulse import PULSE
from millrace_shard.engine.engine import Engine
from millrace_shard.server.wire import (
    capacity_to_pb,
    info_to_pb,
    reply_to_pb,
    step_from_pb,
    warmup_from_pb,
)


class InProcessShard:
    """The interface that the batcher needs of a `StepChannel` and its `ShardGroup`, over one engine in this process.

    Messages are written and parsed as on the wire, so that only the transport is missing from the time.
    """

    has_kv_store = False
    """The KV ends with the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.group = self
        self._epoch = 0
        self._number = 0
        self._replies: deque[asyncio.Future[StepReply]] = deque()

    @property
    def kv_stores(self) -> tuple[int, ...]:
        """A number of the KV memory, which is the same for the life of the engine."""
        return (0,)

    @property
    def last_sent(self) -> int:
        """Number of the last step sent in this epoch."""
        return self._number

    def info(self) -> ShardInfo:
        """The loaded model."""
        message = info_to_pb(self._engine.loaded, deterministic=True, prefill_logprobs=False)
        return info_from_pb(message)

    async def warm_up(self, **fields: int | list[int]) -> Capacity:
        """Allocate the KV cache and run the largest step."""
        request = pb.WarmupRequest(**fields)  # type: ignore[arg-type]
        future = self._engine.warm_up(warmup_from_pb(request))
        return capacity_from_pb([capacity_to_pb(await asyncio.wrap_future(future))])

    def __len__(self) -> int:
        return 1

    async def health(self) -> bool:
        """Do nothing: the engine lives as long as this process."""
        return True

    async def pulse(self) -> int:
        """Return the number that every layer advances."""
        return PULSE.value

    async def open(self) -> None:
        """Begin a new epoch with an empty batch."""
        self._epoch = max(self._epoch + 1, time.time_ns())
        self._number = 0
        self._replies.clear()
        self._submit(open_to_pb(self._epoch))
        await self._answer()

    async def send(self, plan: StepPlan) -> None:
        """Submit a step to the engine."""
        self._number += 1
        message = plan_to_pb(plan, epoch=self._epoch, number=self._number)
        self._submit(message)

    async def answers_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the answer to the oldest step; whether it arrived."""
        done, _ = await asyncio.wait({self._replies[0]}, timeout=seconds)
        return bool(done)

    async def receive(self) -> StepResult:
        """The answer to the oldest step in flight; raises ShardError when it failed."""
        return result_from_pb([await self._answer()])

    def _submit(self, message: pb.StepRequest) -> None:
        step = step_from_pb(message)
        self._replies.append(asyncio.wrap_future(self._engine.step(step)))

    async def _answer(self) -> pb.StepResponse:
        # Cancelling the batcher must not cancel the step: the engine still answers it.
        reply = await asyncio.shield(self._replies.popleft())
        answer = reply_to_pb(reply, with_tokens=True)
        if answer.HasField("error"):
            raise ShardError(answer.error.message)
        return answer
