"""A hash shard with the faults that a test plans, and its service over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.scheduler.window_blocks import WindowGroup
from millrace_testing.adapters.fake_adapters import AdapterLoadError, FakeAdapters
from millrace_testing.shards.fake_images import (
    EDGE,
    IMAGE_TOKEN_ID,
    NUM_LAYERS,
    ROWS_PER_TILE,
    FakeImages,
)
from millrace_testing.shards.hash_choices import Choices
from millrace_testing.shards.hash_shard import HashShard, Running
from millrace_testing.shards.hash_tokens import EOS_TOKEN_ID, VOCAB_SIZE, expected_tokens


def continuation(ids: list[int], count: int, seed: int = 0, adapter: str = "") -> list[int]:
    """The `count` tokens after `ids` with the adapter of this digest."""
    return expected_tokens(ids, count, seed=seed, adapter=adapter)


class PlannedChoices(Choices):
    """Rows get all draft tokens that the router allows, as many of which are right as the shard's test plans."""

    def __init__(self, shard: FakeShard) -> None:
        super().__init__()
        self._shard = shard
        self._num_right = 0

    def num_draft_tokens(self, most: int) -> int:
        self._num_right = self._shard.num_right(most)
        return most

    def is_right(self) -> bool:
        self._num_right -= 1
        return self._num_right >= 0

    def chain_length(self) -> int:
        return self._shard.num_forced

    def num_filled(self, most: int) -> int:
        return most

    def says_zero(self) -> bool:
        return True


class FakeShard(HashShard):
    """A hash shard whose steps fail, wait and yield what a test plans."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        windows: tuple[WindowGroup, ...] = (),
        block_size: int = 4,
        max_batch_size: int = 16,
        adapters: FakeAdapters | None = None,
        images: FakeImages | None = None,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            max_batch_size=max_batch_size,
            choices=PlannedChoices(self),
            adapters=adapters,
            windows=windows,
            images=images,
        )
        self.allows_empty_steps = True
        self.infinite_id = None
        self.fail_always: str | None = None
        self.poison_id: int | None = None
        """Steps fail if one of their rows contains this token."""
        self.most_tokens: int | None = None
        """A step of more tokens runs out of memory."""
        self.not_finite = self.corrupt
        self.eos_after: dict[int, int] = {}
        """Numbers of tokens after which requests end, by request id."""
        self.num_right: Callable[[int], int] = int
        """The number of right tokens among so many draft tokens."""
        self.num_forced = 0
        """Jump-forward tokens of every row with a grammar, in every step."""
        self.gate: Event | None = None
        self.warmup_gate: Event | None = None
        self.is_warm = True
        self.attention = "none"
        self.activations = "exact"
        self.deterministic = False
        self.stuck_seconds = 0.0
        self.group = 1
        """The number of its group."""
        self.ended: list[str] = []
        """Reasons for which the router ended it."""

    @property
    def sequences(self) -> dict[int, Running]:
        """The sequences by slot."""
        return self.running

    @property
    def blocks_in_use(self) -> int:
        """Blocks that live sequences own."""
        return len({block for running in self.running.values() for block in running.table})

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        """Check and execute one step, unless it is to fail."""
        if not self.is_warm:
            self.steps.append(request)
            return _failed(request, pb.StepError.KIND_FAILED, "no step before Warmup")
        if request.WhichOneof("work") == "open":
            self.epoch = request.epoch - 1
            return super().step(request)
        self.fail_next = self.fail_next or self.fail_always
        response = super().step(request)
        if response.HasField("error"):
            return response
        for slot in response.failed_slots:
            is_guided = self.running[slot].pb.HasField("grammar")
            response.failure_reasons.append("too many states" if is_guided else "")
        if self.most_tokens is not None and _num_tokens(request) > self.most_tokens:
            self.has_failed = True
            return _failed(request, pb.StepError.KIND_OUT_OF_MEMORY, "out of memory")
        if self._is_poisoned(request):
            self.has_failed = True
            return _failed(request, pb.StepError.KIND_FAILED, "poison")
        return response

    def _step(self, request: pb.StepRequest) -> pb.StepResponse:
        if self.gate is not None and request.WhichOneof("work") != "open":
            assert self.gate.wait(30)
        return super()._step(request)

    def _is_poisoned(self, request: pb.StepRequest) -> bool:
        slots = [*_work(request).decode_slots, *request.prefill.chunk_slots]
        return any(self.poison_id in self.running[slot].ids for slot in slots)

    def predict(self, running: Running) -> int:
        num_prompt = len(running.pb.input_ids) - running.pb.generated_tokens
        if self.eos_after.get(running.pb.request_id) == running.num_computed - num_prompt:
            return EOS_TOKEN_ID
        return super().predict(running)


def _failed(
    request: pb.StepRequest, kind: pb.StepError.Kind.ValueType, message: str
) -> pb.StepResponse:
    response = pb.StepResponse(epoch=request.epoch, number=request.number)
    response.error.kind, response.error.message = kind, message
    return response


def _work(request: pb.StepRequest) -> pb.Prefill | pb.Decode:
    is_prefill = request.WhichOneof("work") == "prefill"
    return request.prefill if is_prefill else request.decode


def _num_tokens(request: pb.StepRequest) -> int:
    work = _work(request)
    num_decoded = sum(work.decode_tokens) or len(work.decode_slots)
    return num_decoded + sum(request.prefill.chunk_tokens)


class FakeShardService(pb_grpc.ShardServiceServicer):
    """Serves a fake shard over gRPC."""

    def __init__(self, shard: FakeShard, *, rank: int = 0, world_size: int = 1) -> None:
        self.shard = shard
        self._rank = rank
        self._world_size = world_size

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return pb.InfoResponse(
            model_type="fake",
            dtype="float32",
            device_type="cpu",
            vocab_size=VOCAB_SIZE,
            max_position_embeddings=1024,
            eos_token_ids=[EOS_TOKEN_ID],
            block_size=self.shard.block_size,
            rank=self._rank,
            world_size=self._world_size,
            attention=self.shard.attention,
            deterministic=self.shard.deterministic,
            prefill_logprobs=True,
            kv_cache_dtype="float32",
            quantize_activations=self.shard.activations,
            hidden_size=2,
            max_draft_tokens=self.shard.max_draft_tokens,
            adapter_modules=self.shard.adapters.modules(),
            group=self.shard.group,
            vision=pb.Vision(
                family="smolvlm",
                rows_per_tile=ROWS_PER_TILE,
                tile_height=EDGE,
                tile_width=EDGE,
                image_token_id=IMAGE_TOKEN_ID,
                num_layers=NUM_LAYERS,
                mask=pb.Vision.Mask.Value(f"MASK_{self.shard.images.mask.name}"),
            )
            if self.shard.images.num_rows
            else None,
        )

    def Blocks(self, request: pb.BlocksRequest, context: grpc.ServicerContext) -> pb.BlocksResponse:
        return pb.BlocksResponse()

    def End(self, request: pb.EndRequest, context: grpc.ServicerContext) -> pb.EndResponse:
        ends = request.group == self.shard.group
        if ends:
            self.shard.ended.append(request.reason)
            # Its supervisor has started another at once.
            self.shard.group += 1
        return pb.EndResponse(ends=ends)

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        stuck = self.shard.stuck_seconds
        return pb.HealthResponse(
            pending_steps=int(stuck > 0), idle_ns=int(stuck * 1e9), warmed_up=self.shard.is_warm
        )

    def CompileGrammar(
        self, request: pb.CompileGrammarRequest, context: grpc.ServicerContext
    ) -> pb.CompileGrammarResponse:
        return pb.CompileGrammarResponse()

    def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.LoadAdapterResponse:
        shard = self.shard
        shard.adapters.num_asked += 1
        if (gate := shard.adapters.gates.get(request.digest)) is not None:
            assert gate.wait(30)
        if request.epoch != shard.epoch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another epoch")
        try:
            error = shard.adapters.load(request.slot, request.digest, in_use=shard.adapters_in_use)
        except AdapterLoadError as fault:
            context.abort(fault.code, str(fault))
        return pb.LoadAdapterResponse(error=error)

    def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        if request.epoch != self.shard.epoch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another epoch")
        self.shard.adapters.unload(request.slot, in_use=self.shard.adapters_in_use)
        return pb.UnloadAdapterResponse()

    def PutImage(
        self, request_iterator: Iterator[pb.PutImageRequest], context: grpc.ServicerContext
    ) -> pb.PutImageResponse:
        requests = list(request_iterator)
        if requests[0].epoch != self.shard.epoch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another epoch")
        return pb.PutImageResponse(error=self.shard.images.put(requests))

    def Warmup(self, request: pb.WarmupRequest, context: grpc.ServicerContext) -> pb.WarmupResponse:
        if self.shard.warmup_gate is not None:
            assert self.shard.warmup_gate.wait(30)
        if request.num_blocks > self.shard.num_blocks:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Not enough memory")
        self.shard.is_warm = True
        adapters = self.shard.adapters
        adapters.slots.clear()
        adapters.num_pages = request.adapter_pages or adapters.num_pages
        num_blocks = request.num_blocks or self.shard.num_blocks
        sizes = [group.num_blocks for group in self.shard.windows]
        if request.num_blocks and request.window_blocks != sizes:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "other window groups than before")
        capacity = (num_blocks - 1) * self.shard.block_size
        total = request.max_total_tokens or min(capacity, 1024)
        return pb.WarmupResponse(
            num_blocks=num_blocks,
            max_batch_total_tokens=capacity,
            max_total_tokens=total,
            max_input_tokens=request.max_input_tokens or total - 1,
            adapter_pages=adapters.num_pages,
            feature_rows=self.shard.images.num_rows,
            image_slots=self.shard.images.num_slots,
            window_groups=[
                pb.WindowGroup(
                    num_blocks=group.num_blocks,
                    window=group.window,
                    reach=group.reach,
                    num_layers=group.num_layers,
                    bytes_per_token=group.bytes_per_token,
                )
                for group in self.shard.windows
            ],
        )

    def Steps(
        self, request_iterator: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepResponse]:
        for request in request_iterator:
            yield self.shard.step(request)
            self.shard.answered = request.number


@contextmanager
def serve_fake_shard(
    address: str, shard: FakeShard, *, rank: int = 0, world_size: int = 1
) -> Iterator[grpc.Server]:
    """A listening fake; `address` is a gRPC target such as `unix:/path`."""
    server = grpc.server(ThreadPoolExecutor(8))
    service = FakeShardService(shard, rank=rank, world_size=world_size)
    pb_grpc.add_ShardServiceServicer_to_server(service, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield server
    finally:
        server.stop(grace=None).wait()
