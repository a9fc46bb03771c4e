"""A shard that computes nothing, to measure the router alone: `python -m bench.router.blank_shard ADDRESS …`.

It implements the whole wire of steps, answers every row with a token prepared in advance, and takes a
given time for each step. It counts the time without a step to run, which is the part of router and wire
that the forward pass does not hide. For each line on standard input it prints the counts since the last
one, as JSON. The end of standard input ends the process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from struct import Struct
from threading import Thread

import grpc

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 15
MAX_TOKENS = 4096
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
        self,
        *,
        vocab_size: int,
        forward_seconds: float,
        num_blocks: int = NUM_BLOCKS,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._vocab_size = vocab_size
        self._forward_seconds = forward_seconds
        self._num_blocks = num_blocks
        self._max_tokens = max_tokens
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
            max_position_embeddings=self._max_tokens,
            block_size=BLOCK_SIZE,
            world_size=1,
            attention="none",
        )

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
            max_total_tokens=self._max_tokens,
            max_input_tokens=self._max_tokens - 1,
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

    def seconds(self, request: pb.StepRequest) -> float:  # noqa: ARG002
        """The duration of a step's forward pass."""
        return self._forward_seconds

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
    if work not in {"prefill", "decode"}:
        return None
    step = request.prefill if work == "prefill" else request.decode
    for admitted in step.change.admitted:
        left[admitted.slot] = len(admitted.input_ids) - admitted.cached_tokens
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
    parser.add_argument("address", help="gRPC target, such as unix:/tmp/x")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--forward-ms", type=float, default=0.0)
    parser.add_argument("--num-blocks", type=int, default=NUM_BLOCKS)
    options = parser.parse_args()
    shard = BlankShard(
        vocab_size=options.vocab_size,
        forward_seconds=options.forward_ms / 1e3,
        num_blocks=options.num_blocks,
    )
    server = grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_ShardServiceServicer_to_server(shard, server)
    server.add_insecure_port(options.address)
    server.start()
    for _ in sys.stdin:
        counts, shard.counts = shard.counts, Counts()
        print(json.dumps(asdict(counts)), flush=True)
    server.stop(grace=None).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
