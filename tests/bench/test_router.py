"""The parts of the router's benchmark: the shard that computes nothing, the counting client, the profile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from bench.router.blank_shard import BlankShard
from bench.router.event_counter import Counted, EventStream

from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_testing.router.fake_router import collect, ids_of, new_batcher, running
from millrace_testing.router.fake_router import request as valid_request
from millrace_testing.router.sse import event
from millrace_testing.shards.fake_shard import FakeShard
from millrace_testing.shards.hash_tokens import VOCAB_SIZE


@contextmanager
def blank(address: str) -> Iterator[BlankShard]:
    shard = BlankShard({}, vocab_size=VOCAB_SIZE)
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_ShardServiceServicer_to_server(shard, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield shard
    finally:
        server.stop(grace=None).wait()


async def test_the_blank_shard_gives_every_request_its_tokens(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    with blank(address) as shard:
        shards = StepChannel(ShardGroup([address]))
        # Prompts longer than a step's budget, so that they are cut.
        async with running(new_batcher(shards, FakeShard())) as batcher:
            streams = [batcher.submit(valid_request([1] * 20, count)) for count in (1, 5, 9)]
            lengths = [len(ids_of(await collect(stream))) for stream in streams]
        await shards.close()
    assert lengths == [1, 5, 9]
    assert shard.counts.rows >= 15


@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
async def test_events_are_counted_in_packets_of_any_size(size: int) -> None:
    chunks = [event(index, last=index == 3) for index in (1, 2, 3)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [*chunks, b""])
    stream = EventStream(b"", rounds=1, counted=(counted := Counted()))
    stream.connection_made(Mock(asyncio.Transport))
    stream.data_received(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for start in range(0, len(body), size):
        assert not stream.done.done()
        stream.data_received(body[start : start + size])
    assert stream.done.done()
    assert counted.events == 3
