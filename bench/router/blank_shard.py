"""Shards that compute nothing, to measure routers alone: `python -m bench.router.blank_shard ADDRESS ...`.

Each implements the whole wire of steps, answers every row with a token prepared in advance, and takes for each step
the time that a cost model says. It counts the time without a step to run, which is the part of router and wire
that the forward pass does not hide. For each line on standard input the counts of the first shard since the last one
are printed, as JSON. The end of standard input ends the process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from struct import Struct
from threading import Thread

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.prediction.cost import COEFFICIENTS

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 15
MAX_TOKENS = 8192
"""The longest prompt with its answer."""
CONTEXT_FREE = ("decode_context_token", "prefill_pair")
"""Coefficients that the shards ignore: they do not know how long contexts are."""
FIRST_TOKEN = 320
"""Lower ids are control tokens and single bytes, which are rare in text; a smaller vocabulary is used whole."""
NUM_PREPARED = 1 << 14

StepQueue = SimpleQueue[pb.StepRequest | None]
AnswerQueue = SimpleQueue[pb.StepResponse | None]


@dataclass(slots=True)
class Counts:
    """Counts of a shard since the last query; times in seconds."""

    steps: int = 0
    rows: int = 0
    idle: float = 0.0
    """Time between two forward passes in which the shard waited for the second step."""


class BlankShard(pb_grpc.ShardServiceServicer):
    """One reader and one engine thread for each stream, as in the real shard."""

    def __init__(
        self, costs: Mapping[str, float], *, vocab_size: int, num_blocks: int = NUM_BLOCKS
    ) -> None:
        """`costs` has coefficients of the cost model; raises ValueError if a step would depend on contexts."""
        if any(costs.get(name) for name in CONTEXT_FREE):
            raise ValueError(f"{' and '.join(CONTEXT_FREE)} have to be 0")
        self._costs = {**dict.fromkeys(COEFFICIENTS, 0.0), **costs}
        self._vocab_size = vocab_size
        self._num_blocks = num_blocks
        generator = random.Random(0)
        single = Struct("<f")
        ids = generator.choices(
            range(vocab_size)[FIRST_TOKEN:] or range(vocab_size), k=NUM_PREPARED
        )
        logprobs = [-generator.expovariate(1.0) for _ in range(NUM_PREPARED)]
        self._ids = ids
        self._logprobs = [single.unpack(single.pack(value))[0] for value in logprobs]
        self.counts = Counts()

    def Info(self, _: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:  # noqa: N802, ARG002
        """Describe a model of any length that never ends by itself."""
        return pb.InfoResponse(
            model_type="blank",
            dtype="float32",
            device_type="cpu",
            vocab_size=self._vocab_size,
            max_position_embeddings=MAX_TOKENS,
            block_size=BLOCK_SIZE,
            world_size=1,
            attention="none",
        )

    def Blocks(self, _: pb.BlocksRequest, context: grpc.ServicerContext) -> pb.BlocksResponse:  # noqa: N802, ARG002
        """Report that no KV outlives this shard."""
        return pb.BlocksResponse()

    def End(self, _: pb.EndRequest, context: grpc.ServicerContext) -> pb.EndResponse:  # noqa: N802, ARG002
        """Refuse to end: no supervisor restarts this shard."""
        return pb.EndResponse()

    def Health(self, _: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:  # noqa: N802, ARG002
        """Report health."""
        return pb.HealthResponse(warmed_up=True)

    def Warmup(self, _: pb.WarmupRequest, context: grpc.ServicerContext) -> pb.WarmupResponse:  # noqa: N802, ARG002
        """Report the KV cache, which is large by default."""
        return pb.WarmupResponse(
            num_blocks=self._num_blocks,
            max_batch_total_tokens=(self._num_blocks - 1) * BLOCK_SIZE,
            max_total_tokens=MAX_TOKENS,
            max_input_tokens=MAX_TOKENS - 1,
        )

    def CompileGrammar(  # noqa: N802
        self,
        _: pb.CompileGrammarRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> pb.CompileGrammarResponse:
        """Accept every grammar, and ignore it."""
        return pb.CompileGrammarResponse()

    def LoadAdapter(  # noqa: N802
        self,
        _: pb.LoadAdapterRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> pb.LoadAdapterResponse:
        """Accept every adapter, and ignore it."""
        return pb.LoadAdapterResponse()

    def PutImage(  # noqa: N802
        self,
        requests: Iterator[pb.PutImageRequest],
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> pb.PutImageResponse:
        """Accept every image, and ignore it."""
        for _ in requests:
            pass
        return pb.PutImageResponse()

    def UnloadAdapter(  # noqa: N802
        self,
        _: pb.UnloadAdapterRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> pb.UnloadAdapterResponse:
        """Accept."""
        return pb.UnloadAdapterResponse()

    def Steps(  # noqa: N802
        self,
        requests: Iterator[pb.StepRequest],
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> Iterator[pb.StepResponse]:
        """Read ahead, run in order, answer."""
        steps: StepQueue = SimpleQueue()
        answers: AnswerQueue = SimpleQueue()
        Thread(target=_read, args=(requests, steps), daemon=True).start()
        Thread(target=self._run, args=(steps, answers), daemon=True).start()
        while (answer := answers.get()) is not None:
            yield answer

    def _run(self, steps: StepQueue, answers: AnswerQueue) -> None:
        left: dict[int, int] = {}
        slots: list[int] | None = None
        # After a step without a forward pass the wait may be for the load itself.
        while (request := self._next(steps, counted=slots is not None)) is not None:
            answer = pb.StepResponse(epoch=request.epoch, number=request.number)
            slots = _rows(request, left)
            if slots is not None:
                if seconds := self.seconds(request):
                    time.sleep(seconds)
                self._fill(answer, slots)
            answers.put(answer)
        answers.put(None)

    def seconds(self, request: pb.StepRequest) -> float:
        """The duration of a step's forward pass."""
        costs = self._costs
        if request.WhichOneof("work") == "decode":
            return costs["step"] + costs["decode_row"] * len(request.decode.decode_slots)
        prefill = request.prefill
        rows = costs["decode_row"] * len(prefill.decode_slots)
        chunks = costs["prefill_token"] * sum(prefill.chunk_tokens)
        if prefill.chunk_tokens:
            chunks += costs["prefill_step"]
        return costs["step"] + rows + chunks

    def _next(self, steps: StepQueue, *, counted: bool) -> pb.StepRequest | None:
        try:
            return steps.get_nowait()
        except Empty:
            began = time.perf_counter()
            request = steps.get()
            if counted:
                self.counts.idle += time.perf_counter() - began
            return request

    def _fill(self, answer: pb.StepResponse, slots: list[int]) -> None:
        count = len(slots)
        start = answer.number * count % (NUM_PREPARED - count)
        answer.slots.extend(slots)
        answer.counts.extend([1] * count)
        answer.ids.extend(self._ids[start : start + count])
        answer.logprobs.extend(self._logprobs[start : start + count])
        self.counts.steps += 1
        self.counts.rows += count


def _read(requests: Iterator[pb.StepRequest], steps: StepQueue) -> None:
    try:
        for request in requests:
            steps.put(request)
    except grpc.RpcError:
        pass
    finally:
        steps.put(None)


def _rows(request: pb.StepRequest, left: dict[int, int]) -> list[int] | None:
    """Slots that yield a token, or None when the step has no forward pass; `left` counts prompt tokens by slot."""
    work = request.WhichOneof("work")
    for change in (request.prefill.change, request.decode.change, request.encode.change):
        for admitted in change.admitted:
            left[admitted.slot] = len(admitted.input_ids) - admitted.cached_tokens
    if work not in {"prefill", "decode"}:
        return None
    step = request.prefill if work == "prefill" else request.decode
    slots = []
    if work == "prefill":
        chunks = request.prefill
        for slot, count in zip(chunks.chunk_slots, chunks.chunk_tokens, strict=True):
            left[slot] -= count
            if not left[slot]:
                slots.append(slot)
    slots.extend(step.decode_slots)
    return slots


def main() -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.router.blank_shard", description=__doc__)
    parser.add_argument("addresses", nargs="+", help="gRPC targets, such as unix:/tmp/x")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, default=NUM_BLOCKS)
    parser.add_argument("--costs", type=json.loads, default={}, help="coefficients, as JSON")
    options = parser.parse_args()
    shards, servers = [], []
    for address in options.addresses:
        shard = BlankShard(
            options.costs, vocab_size=options.vocab_size, num_blocks=options.num_blocks
        )
        server = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_ShardServiceServicer_to_server(shard, server)
        server.add_insecure_port(address)
        server.start()
        shards.append(shard)
        servers.append(server)
    first = shards[0]
    for _ in sys.stdin:
        counts, first.counts = first.counts, Counts()
        print(json.dumps(asdict(counts)), flush=True)
    for server in servers:
        server.stop(grace=None).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
