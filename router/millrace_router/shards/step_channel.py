"""The stream of numbered steps to a group of shards, and the answers in the same order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from millrace_proto import generate_pb2 as pb
from millrace_router.request.images import PreparedImage
from millrace_router.scheduler.step_plan import StepPlan
from millrace_router.shards.errors import ShardError
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_result import StepResult, result_from_pb
from millrace_router.shards.wire import open_to_pb, plan_to_pb


class StepObserver(Protocol):
    """Receives every message to the shards and every answer. No method raises."""

    def sent(self, message: pb.StepRequest) -> None:
        """Receive a message that is sent to the shards."""

    def answered(self, answers: Sequence[pb.StepResponse]) -> None:
        """Receive all ranks' answers to the oldest unanswered message, in order of rank."""

    def failed(self, kind: str, reason: str) -> None:
        """Record that the epoch has failed."""

    def adapter_changed(self, epoch: int, slot: int, digest: str | None) -> None:
        """Record that all ranks have the adapter `digest` in `slot`, or none there."""

    def image_put(self, epoch: int, slot: int, first_row: int, image: PreparedImage) -> None:
        """Record that all ranks have the pixels of `image` in `slot`."""


class StepChannel:
    """Sends each step to every rank of a group; rank 0's tokens count.

    Several steps may be in flight; answers come in order. Any `ShardError` ends the epoch.
    """

    def __init__(self, group: ShardGroup) -> None:
        self.group = group
        self.observer: StepObserver | None = None
        """Receives messages and answers of later epochs."""
        self.settle: Callable[[], Awaitable[int]] | None = None
        """Decides before each epoch whether blocks keep their KV, and returns the life of their ledger."""
        self.epoch = 0
        """The current epoch; 0 before the first."""
        self.last_sent = 0
        """Number of the last step sent in this epoch."""
        self._reading: asyncio.Task[list[pb.StepResponse]] | None = None
        """Reads the oldest unanswered step, after a wait with a time limit."""

    async def open(self) -> None:
        """Begin a new epoch with an empty batch on every rank. All ranks must be reachable.

        Restarted shards are warmed up again.

        Raises:
            ShardChanged: restarted shards differ from the shards of the first warm-up. Further calls raise it too.
            ShardError: the epoch cannot begin.

        """
        if self.epoch:
            await self.reset()
        await self.group.restore()
        life = 0 if self.settle is None else await self.settle()
        self.epoch = max(self.epoch + 1, time.time_ns())
        self.last_sent = 0
        await self.write(open_to_pb(self.epoch, life))
        # The shards finish the steps that they have received before.
        await self.group.while_computing(self.read(), "a shard does not begin the epoch")

    async def send(self, plan: StepPlan) -> None:
        """Send a step without waiting for its answer."""
        self.last_sent += 1
        await self.write(plan_to_pb(plan, epoch=self.epoch, number=self.last_sent))

    async def answers_within(self, seconds: float) -> bool:
        """Wait up to `seconds` for the answer to the oldest step; whether `receive` will return or raise at once."""
        # Cancelling a gRPC read ends the stream, so no timeout may cancel it.
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.create_task(self.read())
        await _done_within(reading, seconds)
        return reading.done()

    async def receive(self) -> StepResult:
        """Return the answer to the oldest unanswered step."""
        reading, self._reading = self._reading, None
        return result_from_pb(await (reading or self.read()))

    async def write(self, message: pb.StepRequest) -> None:
        """Send a message to every rank unchanged."""
        if self.observer is not None:
            self.observer.sent(message)
        await self.group.write(message)

    async def read(self) -> list[pb.StepResponse]:
        """Return every rank's answer to the oldest unanswered message."""
        answers = await self.group.read()
        if self.observer is not None:
            self.observer.answered(answers)
        return answers

    async def load_adapter(self, slot: int, digest: str, *, timeout: float) -> None:
        """Have every rank load an adapter in this epoch; raises as `ShardGroup.load_adapter`."""
        epoch = self.epoch
        await self.group.load_adapter(epoch, slot, digest, timeout=timeout)
        if self.observer is not None:
            self.observer.adapter_changed(epoch, slot, digest)

    async def unload_adapter(self, slot: int, *, timeout: float) -> None:
        """Have every rank free an adapter slot in this epoch."""
        epoch = self.epoch
        await self.group.unload_adapter(epoch, slot, timeout=timeout)
        if self.observer is not None:
            self.observer.adapter_changed(epoch, slot, None)

    async def put_image(
        self, slot: int, first_row: int, image: PreparedImage, *, timeout: float
    ) -> None:
        """Have every rank hold the pixels of an image in this epoch; raises as `ShardGroup.put_image`."""
        epoch = self.epoch
        await self.group.put_image(epoch, slot, first_row, image, timeout=timeout)
        if self.observer is not None:
            self.observer.image_put(epoch, slot, first_row, image)

    def report_failure(self, kind: str, error: ShardError) -> None:
        """Pass the reason of the epoch's end to the observer."""
        if self.observer is not None:
            self.observer.failed(kind, str(error))

    async def reset(self) -> None:
        """Replace every stream and channel; calls under way are cancelled."""
        await self._stop_reading()
        await self.group.reset()

    async def close(self) -> None:
        """Close every stream and channel."""
        await self._stop_reading()
        await self.group.close()

    async def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                reading.exception()


async def _done_within(task: asyncio.Task[Any], seconds: float) -> None:
    """Wait up to `seconds` for the end of `task`. Runs in every step; `asyncio.wait` takes three times the calls."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = loop.call_later(seconds, wake)
    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        timer.cancel()
        task.remove_done_callback(wake)
