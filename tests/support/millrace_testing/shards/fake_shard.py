"""A shard without a model, which checks every step as strictly as a real one.

The next token is computed from every id before it, so a lost, repeated or misplaced token changes all that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_testing.adapters.fake_adapters import AdapterLoadError, FakeAdapters, seed_of
from millrace_testing.shards.hash_choices import decode_limits

VOCAB_SIZE = 97
EOS_TOKEN_ID = 96


def next_token(ids: list[int], seed: int = 0, adapter: str = "") -> int:
    """The token after `ids` with the adapter of this digest; never the end of sequence."""
    value = seed + 17 + seed_of(adapter)
    for id_ in ids:
        value = (value * 31 + id_ + 7) % 1_000_003
    return value % (VOCAB_SIZE - 1)


def continuation(ids: list[int], count: int, seed: int = 0, adapter: str = "") -> list[int]:
    """The `count` tokens after `ids` with the adapter of this digest."""
    sequence = list(ids)
    for _ in range(count):
        sequence.append(next_token(sequence, seed, adapter))
    return sequence[len(ids) :]


def pooled_values(ids: list[int], logit_ids: list[int]) -> list[float]:
    """What a prompt of these `ids` yields: a state of two numbers, or the logits of some ids."""
    return [float(next_token(ids, seed)) for seed in logit_ids or (1, 2)]


@dataclass
class FakeSequence:
    """The state of a slot."""

    pb: pb.Sequence
    ids: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)


class FakeShard:
    """Executes steps; raises AssertionError if the router breaks the rules of the wire."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_batch_size: int = 16,
        adapters: FakeAdapters | None = None,
    ) -> None:
        self.adapters = adapters or FakeAdapters()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_batch_size = max_batch_size
        self.sequences: dict[int, FakeSequence] = {}
        self.steps: list[pb.StepRequest] = []
        self.fail_next: str | None = None
        self.fail_always: str | None = None
        self.poison_id: int | None = None
        """Steps fail if one of their rows contains this token."""
        self.most_tokens: int | None = None
        """A step of more tokens runs out of memory."""
        self.not_finite: set[int] = set()
        self.eos_after: dict[int, int] = {}
        self.max_draft_tokens = 0
        """The largest number of draft tokens of a row; every row gets as many as the router allows."""
        self.num_right: Callable[[int], int] = int
        """The number of right tokens among so many draft tokens."""
        self.num_forced = 0
        """Jump-forward tokens of every row with a grammar, in every step."""
        self.gate: Event | None = None
        self.warmup_gate: Event | None = None
        self.is_warm = True
        self.attention = "none"
        self.deterministic = False
        self.stuck_seconds = 0.0
        self.epoch = 0
        """The current epoch."""
        self.group = 1
        """The number of its group."""
        self.ended: list[str] = []
        """Reasons for which the router ended it."""
        self._number = 0
        self._failed = False
        self._broken: set[int] = set()
        self._contents: dict[int, tuple[str, list[int]]] = {}
        """The adapter and the tokens of full blocks."""

    @property
    def adapters_in_use(self) -> set[int]:
        """Adapter slots of all sequences."""
        return {sequence.pb.adapter_slot for sequence in self.sequences.values()}

    @property
    def blocks_in_use(self) -> int:
        """Blocks that live sequences own."""
        return len({block for sequence in self.sequences.values() for block in sequence.blocks})

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        """Check and execute one step."""
        self.steps.append(request)
        work = request.WhichOneof("work")
        response = pb.StepResponse(epoch=request.epoch, number=request.number)
        if not self.is_warm:
            response.error.kind = pb.StepError.KIND_FAILED
            response.error.message = "no step before Warmup"
            return response
        if work == "open":
            self.sequences.clear()
            self._contents.clear()
            self.epoch, self._number, self._failed = request.epoch, 0, False
            return response
        assert (request.epoch, request.number) == (self.epoch, self._number + 1)
        self._number += 1
        if self.gate is not None:
            assert self.gate.wait(30)
        if self._failed:
            response.error.kind = pb.StepError.KIND_REFUSED
            response.error.message = "an earlier step failed"
            return response
        failure, self.fail_next = self.fail_next or self.fail_always, None
        if failure is not None:
            return self._fail(response, pb.StepError.KIND_FAILED, failure)
        if work == "filter_batch":
            for slot in request.filter_batch.dropped_slots:
                del self.sequences[slot]
        else:
            self._forward(request, response)
            response = self._harmed(request, response)
        return response

    def _harmed(self, request: pb.StepRequest, response: pb.StepResponse) -> pb.StepResponse:
        if self.most_tokens is not None and _num_tokens(request) > self.most_tokens:
            return self._fail(response, pb.StepError.KIND_OUT_OF_MEMORY, "out of memory")
        if self._is_poisoned(request):
            return self._fail(response, pb.StepError.KIND_FAILED, "poison")
        return response

    def _is_poisoned(self, request: pb.StepRequest) -> bool:
        slots = [*_work(request).decode_slots, *request.prefill.chunk_slots]
        rows = [self.sequences[slot] for slot in slots if slot in self.sequences]
        return any(self.poison_id in row.ids for row in rows)

    def _fail(
        self, response: pb.StepResponse, kind: pb.StepError.Kind.ValueType, message: str
    ) -> pb.StepResponse:
        self._failed = True
        failed = pb.StepResponse(epoch=response.epoch, number=response.number)
        failed.error.kind, failed.error.message = kind, message
        return failed

    def _forward(self, request: pb.StepRequest, response: pb.StepResponse) -> None:
        prefill = request.WhichOneof("work") == "prefill"
        step = request.prefill if prefill else request.decode
        self._change(step.change)
        rows = 0
        if prefill:
            for slot, count in zip(
                request.prefill.chunk_slots, request.prefill.chunk_tokens, strict=True
            ):
                sequence = self.sequences[slot]
                rows += 1
                if slot in self._broken:
                    response.failed_slots.append(slot)
                    continue
                assert 0 < count <= len(sequence.ids) - sequence.num_computed
                start = sequence.num_computed
                sequence.num_computed += count
                self._covered(sequence)
                if sequence.pb.prefill_logprobs:
                    response.prefill_slots.append(slot)
                    response.prefill_counts.append(count)
                    response.prefill_logprobs.extend(
                        float("nan") if i == 0 else -float(i) for i in range(start, start + count)
                    )
                    top = sequence.pb.prefill_top_n_tokens
                    response.prefill_top_counts.append(top)
                    for i in range(start, start + count):
                        response.prefill_top_ids.extend(i + j for j in range(top))
                        response.prefill_top_logprobs.extend(-i - j / 2 for j in range(top))
                if sequence.num_computed == len(sequence.ids):
                    self._sample(slot, sequence, response)
        limits = decode_limits(step, max_draft_tokens=self.max_draft_tokens)
        for slot, (allowed, draft_tokens) in zip(step.decode_slots, limits, strict=True):
            if slot in self._broken:
                response.failed_slots.append(slot)
            else:
                self._decode(slot, allowed, draft_tokens, response)
            rows += 1
        assert 0 < rows <= self.max_batch_size

    def _decode(
        self, slot: int, allowed: int, draft_tokens: int, response: pb.StepResponse
    ) -> None:
        sequence = self.sequences[slot]
        assert sequence.num_computed >= len(sequence.pb.input_ids), (
            "decodes a sequence with prompt left"
        )
        assert sequence.num_computed + allowed <= len(sequence.blocks) * self.block_size
        pending = len(sequence.ids) - sequence.num_computed
        draft_tokens = max(0, min(draft_tokens, allowed - pending))
        sequence.num_computed += min(pending, allowed)
        if pending <= allowed:
            sequence.num_computed += self._sample(slot, sequence, response, draft_tokens)
        else:
            response.slots.append(slot)
            response.counts.append(0)
        self._covered(sequence)
        if allowed > 1:
            response.computed_slots.append(slot)
            response.computed_positions.append(sequence.num_computed)
            response.drafted_tokens.append(draft_tokens)

    def _change(self, change: pb.BatchChange) -> None:
        for slot in change.dropped_slots:
            self._broken.discard(slot)
            del self.sequences[slot]
        for admitted in change.admitted:
            assert admitted.slot not in self.sequences
            assert admitted.slot < self.max_batch_size
            self.sequences[admitted.slot] = FakeSequence(
                admitted, list(admitted.input_ids), admitted.cached_tokens
            )
            if not self.adapters.is_valid(admitted):
                self._broken.add(admitted.slot)
        owned = {block for sequence in self.sequences.values() for block in sequence.blocks}
        for slot, block in zip(change.grown_slots, change.grown_blocks, strict=True):
            assert 0 < block < self.num_blocks
            sequence = self.sequences[slot]
            end = (len(sequence.blocks) + 1) * self.block_size
            if end <= sequence.pb.cached_tokens:
                expected = self._adapter_of(sequence), sequence.ids[:end]
                assert self._contents[block] == expected, f"block {block} holds others"
            else:
                assert block not in owned, f"block {block} has two owners"
                self._contents.pop(block, None)
            owned.add(block)
            sequence.blocks.append(block)

    def _covered(self, sequence: FakeSequence) -> None:
        """Check that blocks cover the computed positions, and remember the contents of full blocks."""
        size = self.block_size
        assert len(sequence.blocks) * size >= sequence.num_computed
        for i, block in enumerate(sequence.blocks[: sequence.num_computed // size]):
            self._contents[block] = self._adapter_of(sequence), sequence.ids[: (i + 1) * size]

    def _adapter_of(self, sequence: FakeSequence) -> str:
        """The digest that is loaded in the adapter slot of a sequence."""
        if sequence.pb.slot in self._broken:
            return ""
        return self.adapters.digest_for(sequence.pb)

    def _sample(
        self, slot: int, sequence: FakeSequence, response: pb.StepResponse, draft_tokens: int = 0
    ) -> int:
        """Yield the tokens of a row: forced ones, or one more than the right draft tokens, whose number is returned."""
        if sequence.pb.request_id in self.not_finite:
            self._broken.add(slot)
            response.failed_slots.append(slot)
            if sequence.pb.HasField("grammar"):
                response.failure_reasons.append("too many states")
            return 0
        if sequence.pb.HasField("pooling"):
            values = pooled_values(sequence.ids, list(sequence.pb.pooling.logit_ids))
            response.pooled_slots.append(slot)
            response.pooled_counts.append(len(values))
            response.pooled_values.extend(values)
            return 0
        num_right = self.num_right(draft_tokens)
        num_forced = self.num_forced if sequence.pb.HasField("grammar") else 0
        count = num_forced or 1 + num_right
        for _ in range(count):
            sequence.ids.append(self._next(sequence))
        response.slots.append(slot)
        response.counts.append(count)
        response.ids.extend(sequence.ids[-count:])
        response.logprobs.extend([-0.5] * count)
        return 0 if num_forced else num_right

    def _next(self, sequence: FakeSequence) -> int:
        num_prompt = len(sequence.pb.input_ids) - sequence.pb.generated_tokens
        if self.eos_after.get(sequence.pb.request_id) == len(sequence.ids) - num_prompt:
            return EOS_TOKEN_ID
        return next_token(sequence.ids, sequence.pb.parameters.seed, self._adapter_of(sequence))


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
            hidden_size=2,
            max_draft_tokens=self.shard.max_draft_tokens,
            adapter_modules=self.shard.adapters.modules(),
            group=self.shard.group,
        )

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
        capacity = (num_blocks - 1) * self.shard.block_size
        total = request.max_total_tokens or min(capacity, 1024)
        return pb.WarmupResponse(
            num_blocks=num_blocks,
            max_batch_total_tokens=capacity,
            max_total_tokens=total,
            max_input_tokens=request.max_input_tokens or total - 1,
            adapter_pages=adapters.num_pages,
        )

    def Steps(
        self, request_iterator: Iterator[pb.StepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StepResponse]:
        for request in request_iterator:
            yield self.shard.step(request)


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
