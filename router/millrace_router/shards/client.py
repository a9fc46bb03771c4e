"""One shard: control calls, a stream of numbered steps, and the errors of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.shards.channels import open_channel
from millrace_router.shards.errors import ShardBusy, ShardError, ShardHung, ShardLost, StepFailed
from millrace_router.telemetry.trace_context import trace_metadata

GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
UNSENT = "Internal error from Core"
"""`grpc.aio` says so, with the code INTERNAL, if the connection breaks while a message is sent."""
STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)

StepCall = grpc.aio.StreamStreamCall[pb.StepRequest, pb.StepResponse]


class ShardClient:
    """The gRPC calls of one shard."""

    def __init__(self, address: str, tls: grpc.ChannelCredentials | None = None) -> None:
        self.address = address
        self._tls = tls
        self._connect()

    def _connect(self) -> None:
        self._channel = open_channel(self.address, self._tls)
        self._stub: pb_grpc.ShardServiceAsyncStub = pb_grpc.ShardServiceStub(self._channel)
        self._steps: StepCall | None = None

    async def info(self, *, timeout: float | None = None) -> pb.InfoResponse:
        """Describe the loaded model; waits until the shard listens."""
        return await self._stub.Info(pb.InfoRequest(), wait_for_ready=True, timeout=timeout)

    async def health(self, *, timeout: float) -> pb.HealthResponse:
        """The progress of the engine."""
        return await self._stub.Health(pb.HealthRequest(), timeout=timeout)

    async def compile_grammar(self, request: pb.CompileGrammarRequest) -> pb.CompileGrammarResponse:
        """Compile a grammar; waits until the shard listens."""
        return await self._stub.CompileGrammar(
            request, wait_for_ready=True, metadata=trace_metadata()
        )

    async def load_adapter(
        self, request: pb.LoadAdapterRequest, *, timeout: float
    ) -> pb.LoadAdapterResponse:
        """Read an adapter into a slot."""
        return await self._stub.LoadAdapter(request, timeout=timeout)

    async def unload_adapter(
        self, request: pb.UnloadAdapterRequest, *, timeout: float
    ) -> pb.UnloadAdapterResponse:
        return await self._stub.UnloadAdapter(request, timeout=timeout)

    async def put_image(
        self, requests: AsyncIterator[pb.PutImageRequest], *, timeout: float
    ) -> pb.PutImageResponse:
        """Send the pixels of an image."""
        return await self._stub.PutImage(requests, timeout=timeout)

    async def end(self, group: int, reason: str, *, timeout: float) -> bool:
        """End the rank's process if it belongs to `group`; whether it does."""
        request = pb.EndRequest(group=group, reason=reason)
        answer = await self._stub.End(request, timeout=timeout)
        return answer.ends

    async def blocks(self) -> pb.BlocksResponse:
        """The directory of KV blocks that outlive the shard, after all earlier steps."""
        return await self._stub.Blocks(pb.BlocksRequest())

    async def warmup(self, request: pb.WarmupRequest) -> pb.WarmupResponse:
        """Allocate the KV cache and run the largest step."""
        return await self._stub.Warmup(request)

    async def write(self, message: pb.StepRequest) -> None:
        """Send a step; the first one opens the stream."""
        if self._steps is None:
            self._steps = self._stub.Steps()
        await self._steps.write(message)

    async def read(self) -> pb.StepResponse:
        """Return the oldest unread answer.

        Raises:
            StepFailed: the step failed.
            ShardLost: the stream ended.

        """
        if self._steps is None:
            raise ShardLost(f"no step was sent to {self.address}")
        answer = await self._steps.read()
        if not isinstance(answer, pb.StepResponse):
            raise ShardLost(f"shard {self.address} ended its stream of steps")
        if answer.HasField("error"):
            kind = answer.error.kind
            raise StepFailed(
                answer.error.message, out_of_memory=kind == pb.StepError.KIND_OUT_OF_MEMORY
            )
        return answer

    async def reset(self) -> None:
        """Replace stream and channel: a used channel backs off before it reconnects, a new one connects at once."""
        await self._channel.close()
        self._connect()

    async def close(self) -> None:
        await self._channel.close()


def from_grpc(error: BaseException) -> ShardError:
    """Return the error of a failed call; clients may see its message."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return ShardLost("the stream to the shard has ended")
    code, message = error.code(), error.details() or error.code().name
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return ShardHung("a shard does not answer")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return ShardBusy(message)
    # gRPC may report a broken connection as "Stream removed", with the code of an exception in a servicer.
    is_removed = code == grpc.StatusCode.UNKNOWN and "xception" not in message
    if code in GONE or is_removed or message == UNSENT:
        return ShardLost(message)
    return ShardError(message)
