"""The shard's gRPC service; its threads pass all work to the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue
from threading import Thread

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_proto.sequence import Grammar
from millrace_shard.batch.step import StepReply
from millrace_shard.engine.engine import AdapterLoading, Engine
from millrace_shard.engine.kv_capacity import CapacityError
from millrace_shard.errors import (
    AdapterInvalid,
    AdapterMemoryFull,
    EngineEnded,
    ImageInvalid,
    WrongEpoch,
)
from millrace_shard.server.wire import (
    capacity_to_pb,
    directory_to_pb,
    image_from_pb,
    info_to_pb,
    progress_to_pb,
    reply_to_pb,
    step_from_pb,
    warmup_from_pb,
)
from millrace_shard.structured_output.grammar_process import CompilerBusy
from millrace_shard.structured_output.grammar_source import GrammarInvalid
from millrace_shard.structured_output.manager import NO_GRAMMARS

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
    # A router on another host asks every few seconds whether this one is still there, steps or not.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
)
NUM_WORKERS = 96
"""Threads start with the calls. Grammars may occupy `MAX_CALLS` of them; the rest serve steps and health checks."""
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ShardService"].full_name

logger = logging.getLogger(__name__)
Replies = SimpleQueue[Future[StepReply] | None]


class ShardService(pb_grpc.ShardServiceServicer):
    """One method per call of the wire. A stream of steps uses one worker and one thread that reads ahead."""

    def __init__(
        self,
        engine: Engine,
        *,
        deterministic: bool,
        prefill_logprobs: bool,
        end: Callable[[], None],
    ) -> None:
        """`end` ends the process within a second; it returns before."""
        self.engine = engine
        self._end = end
        self._streams: set[Replies] = set()
        self._deterministic = deterministic
        self._prefill_logprobs = prefill_logprobs

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return info_to_pb(
            self.engine.loaded,
            deterministic=self._deterministic,
            prefill_logprobs=self._prefill_logprobs,
        )

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        """The engine's counters; does not wait for the engine."""
        if not self.engine.is_alive():
            context.abort(grpc.StatusCode.UNAVAILABLE, "the engine has ended")
        return progress_to_pb(self.engine.progress())

    def End(self, request: pb.EndRequest, context: grpc.ServicerContext) -> pb.EndResponse:
        """End the process, if it is of the group that the router means."""
        ends = request.group == self.engine.loaded.group.id
        if ends:
            logger.warning("the router ends this rank: %s", request.reason)
            self._end()
        return pb.EndResponse(ends=ends)

    def Warmup(self, request: pb.WarmupRequest, context: grpc.ServicerContext) -> pb.WarmupResponse:
        """Wait for the engine to find and allocate the KV capacity."""
        try:
            capacity = self.engine.warm_up(warmup_from_pb(request)).result()
        except CapacityError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except EngineEnded as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except Exception as error:
            logger.exception("warming up failed")
            context.abort(grpc.StatusCode.INTERNAL, str(error) or type(error).__name__)
        logger.info("KV cache of %d tokens", capacity.max_batch_total_tokens)
        return capacity_to_pb(capacity)

    def Blocks(self, request: pb.BlocksRequest, context: grpc.ServicerContext) -> pb.BlocksResponse:
        """The directory of blocks, after all earlier work."""
        return directory_to_pb(self.engine.submit(self.engine.directory).result())

    def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: grpc.ServicerContext
    ) -> pb.CompileGrammarResponse:
        """Compile on this thread and in another process; does not wait for the engine."""
        grammars = self.engine.loaded.grammars
        if grammars is None or grammars.compiler is None:
            return pb.CompileGrammarResponse(error=NO_GRAMMARS)
        try:
            grammars.compiler.check(Grammar.from_pb(request.grammar))
        except GrammarInvalid as error:
            return pb.CompileGrammarResponse(error=str(error))
        except CompilerBusy as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return pb.CompileGrammarResponse()

    def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.LoadAdapterResponse:
        """Read an adapter on this thread, then put it into its slot between two steps."""
        try:
            self._adapters(context).load(request.epoch, request.slot, request.digest)
        except AdapterInvalid as error:
            return pb.LoadAdapterResponse(error=str(error))
        except AdapterMemoryFull as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except WrongEpoch as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.LoadAdapterResponse()

    def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        """Empty a slot between two steps."""
        try:
            self._adapters(context).unload(request.epoch, request.slot)
        except WrongEpoch as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.UnloadAdapterResponse()

    def PutImage(
        self, request_iterator: Iterator[pb.PutImageRequest], context: grpc.ServicerContext
    ) -> pb.PutImageResponse:
        """Collect the pixels on this thread, then put them into their slot between two steps."""
        first = next(request_iterator, pb.PutImageRequest())
        parts = (request.pixels for request in chain([first], request_iterator))
        try:
            self.engine.put_image(first.epoch, image_from_pb(first), parts)
        except ImageInvalid as error:
            return pb.PutImageResponse(error=str(error))
        except WrongEpoch as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.PutImageResponse()

    def _adapters(self, context: grpc.ServicerContext) -> AdapterLoading:
        store = self.engine.loaded.adapters
        if store is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the shard has no --enable-lora")
        return AdapterLoading(self.engine, store)

    def Steps(
        self, request_iterator: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepResponse]:
        """Answer each step once and in order; a second thread passes further steps to the engine meanwhile."""
        replies: Replies = SimpleQueue()
        self._streams.add(replies)
        reader = Thread(
            target=self._read, args=(request_iterator, replies), name="steps", daemon=True
        )
        reader.start()
        with_tokens = self.engine.loaded.group.rank == 0
        try:
            while (reply := replies.get()) is not None:
                yield reply_to_pb(reply.result(), with_tokens=with_tokens)
        finally:
            self._streams.discard(replies)

    def end_streams(self) -> None:
        """End every stream after the answers to the steps received so far."""
        for replies in tuple(self._streams):
            replies.put(None)

    def _read(self, requests: Iterator[pb.StepRequest], replies: Replies) -> None:
        """Pass the steps of a stream to the engine. The epochs of the stream end with it."""
        epochs = set()
        try:
            for request in requests:
                if request.number == 0:
                    epochs.add(request.epoch)
                step = step_from_pb(request)
                replies.put(self.engine.step(step))
        except grpc.RpcError:
            logger.debug("the router closed a stream of steps")
        finally:
            for epoch in epochs:
                self.engine.end_epoch(epoch)
            replies.put(None)


def new_server(
    service: ShardService,
    address: str,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.ServerInterceptor] = (),
) -> grpc.Server:
    """A server for `address`, a gRPC target such as `unix:/path` or `host:port`, that listens once it is started.

    It uses TLS if there are credentials, and also serves grpc.health.v1 and reflection. Raises RuntimeError if the
    address is not available.
    """
    server = grpc.server(
        ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="grpc"),
        options=SERVER_OPTIONS,
        interceptors=list(interceptors),
    )
    pb_grpc.add_ShardServiceServicer_to_server(service, server)
    states = health.HealthServicer()
    for name in ("", SERVICE_NAME):
        states.set(name, health_pb2.HealthCheckResponse.SERVING)
    service.engine.when_ended(states.enter_graceful_shutdown)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    if credentials is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, credentials)
    return server
