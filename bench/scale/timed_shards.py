"""Blank shards whose steps take what a cost model says: `python -m bench.scale.timed_shards ADDRESS ... --costs JSON`.

One process has the shards of all replicas, which do nothing but wait. The end of standard input ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from bench.router.blank_shard import BlankShard
from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc

MAX_TOKENS = 8192
"""The longest prompt with its answer."""
CONTEXT_FREE = ("decode_context_token", "prefill_pair")
"""Coefficients that the shards ignore: they do not know how long contexts are."""


class TimedShard(BlankShard):
    """A step takes the seconds that the simulator's cost model gives it."""

    def __init__(self, costs: Mapping[str, float], *, vocab_size: int, num_blocks: int) -> None:
        """Raises ValueError if a step would depend on contexts."""
        if any(costs[name] for name in CONTEXT_FREE):
            raise ValueError(f"{' and '.join(CONTEXT_FREE)} have to be 0")
        super().__init__(
            vocab_size=vocab_size,
            forward_seconds=0.0,
            num_blocks=num_blocks,
            max_tokens=MAX_TOKENS,
        )
        self._costs = costs

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


def main() -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale.timed_shards", description=__doc__)
    parser.add_argument("addresses", nargs="+", help="gRPC targets, such as unix:/tmp/x")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    parser.add_argument("--costs", type=json.loads, required=True, help="coefficients, as JSON")
    options = parser.parse_args()
    servers = []
    for address in options.addresses:
        shard = TimedShard(
            options.costs, vocab_size=options.vocab_size, num_blocks=options.num_blocks
        )
        server = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_ShardServiceServicer_to_server(shard, server)
        server.add_insecure_port(address)
        server.start()
        servers.append(server)
    sys.stdin.read()
    for server in servers:
        server.stop(grace=None).wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
