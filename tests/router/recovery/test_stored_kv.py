"""The batcher with a shard whose KV outlives it: rows go on in it, or are computed again after any doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import count

import pytest

from millrace_proto import generate_pb2 as pb
from millrace_router.engine.batcher import Batcher
from millrace_router.recovery import epochs
from millrace_router.scheduler.block_ledger import StoredBlock, StoredBlocks
from millrace_router.shards.errors import ShardError, ShardHung, ShardLost
from millrace_router.shards.step_result import StepResult
from millrace_router.telemetry.instruments import render
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    ids_of,
    new_batcher,
    next_token,
    request,
    running,
)
from millrace_testing.shards.fake_shard import FakeShard, continuation

SIZE = 4
Change = Callable[[StoredBlocks], StoredBlocks]


def directory_of(messages: Iterable[pb.StepRequest]) -> StoredBlocks:
    """What the messages to a shard make it write down."""
    life, blocks = 0, dict[int, StoredBlock]()
    rows = dict[int, list[int]]()
    for message in messages:
        if message.HasField("open"):
            rows.clear()
            if message.open.life != life:
                life = message.open.life
                blocks.clear()
            continue
        work = message.prefill if message.HasField("prefill") else message.decode
        for slot in (*work.change.dropped_slots, *message.filter_batch.dropped_slots):
            del rows[slot]
        for each in work.change.admitted:
            rows[each.slot] = [each.request_id, each.cached_tokens, 0]
        for block in work.change.unsealed_blocks:
            blocks[block] = blocks[block]._replace(key=b"")
        sealed = zip(work.change.sealed_blocks, work.change.sealed_keys, strict=True)
        for block, key in sealed:
            blocks[block] = blocks[block]._replace(key=key)
        for slot, block in zip(work.change.grown_slots, work.change.grown_blocks, strict=True):
            row = rows[slot]
            if row[2] * SIZE >= row[1]:
                blocks[block] = StoredBlock(row[0], message.epoch + message.number, b"")
            row[2] += 1
    return StoredBlocks(life, blocks)


class StoringShards(DirectShards):
    """A shard that the test kills, and whose directory it may change before the next one is there."""

    def __init__(self) -> None:
        shard = FakeShard(num_blocks=64, block_size=SIZE)
        shard.lives = count(1)
        shard.keeps_kv = True
        super().__init__(shard)
        self.has_kv_store = True
        self.error: ShardError | None = None
        """What the next answer is."""
        self.change: Change = lambda stored: stored
        self.num_asked = 0

    async def open(self) -> None:
        # Each epoch has a warm-up of its own.
        self.kv_stores = (self.kv_stores[0] + 1,)
        await super().open()

    async def stored_blocks(self) -> list[StoredBlocks]:
        self.num_asked += 1
        return [self.change(directory_of(self.shard.steps))]

    async def receive(self) -> StepResult:
        await asyncio.sleep(0)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return await super().receive()


def metric(batcher: Batcher, name: str) -> dict[str, float]:
    text = render(batcher._epochs._metrics.registry).decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(name))
    return {series: float(value) for series, _, value in lines if float(value)}


async def served_over(
    error: ShardError, change: Change = lambda stored: stored, *, times: int = 1
) -> tuple[StoringShards, Batcher]:
    """Check that the tokens of six requests, which `error` interrupts, are right."""
    shards = StoringShards()
    batcher = new_batcher(shards, shards.shard, max_batch_size=4, max_batch_prefill_tokens=32)
    async with running(batcher):
        streams = [batcher.submit(request([i, i + 1, 5, 5, 5, 5], 30)) for i in range(6)]
        for _ in range(times):
            for _ in range(7):
                await next_token(streams[0])
            shards.change, shards.error = change, error
        rest = [await collect(stream) for stream in streams[1:]]
        await collect(streams[0])
    expected = [continuation([i, i + 1, 5, 5, 5, 5], 30) for i in range(1, 6)]
    assert [ids_of(events) for events in rest] == expected
    assert shards.shard.violation is None
    return shards, batcher


LOST = ShardLost("killed")
RECOMPUTED = "millrace_tokens_recomputed_total"
DROPPED = "millrace_kv_stores_dropped_total"


@pytest.mark.parametrize("times", [1, 3])
async def test_rows_go_on_in_kept_kv(times: int) -> None:
    shards, batcher = await served_over(LOST, times=times)
    assert shards.num_asked == times
    assert metric(batcher, RECOMPUTED) == {}
    assert metric(batcher, DROPPED) == {}
    lives = {each.open.life for each in shards.shard.steps if each.HasField("open")}
    assert lives == {1}


def without_one(stored: StoredBlocks) -> StoredBlocks:
    """Leave out the block that was handed out first, which a row has."""
    first = min(stored.blocks, key=lambda block: stored.blocks[block].generation)
    return StoredBlocks(
        stored.life, {block: entry for block, entry in stored.blocks.items() if block != first}
    )


def with_other_keys(stored: StoredBlocks) -> StoredBlocks:
    renamed = {
        block: entry._replace(key=bytes(32) if entry.key else b"")
        for block, entry in stored.blocks.items()
    }
    return StoredBlocks(stored.life, renamed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda stored: StoredBlocks(0, {}), "empty"),
        (lambda stored: StoredBlocks(stored.life + 7, stored.blocks), "life"),
        (without_one, "entry"),
        (with_other_keys, "key"),
    ],
)
async def test_kv_in_doubt_is_counted_and_computed_again(change: Change, reason: str) -> None:
    shards, batcher = await served_over(LOST, change)
    assert metric(batcher, DROPPED) == {f'{DROPPED}{{reason="{reason}"}}': 1.0}
    assert metric(batcher, RECOMPUTED)
    opened = [each.open.life for each in shards.shard.steps if each.HasField("open")]
    assert len(opened) == 2
    assert opened[0] != opened[1]


@pytest.mark.parametrize(
    "error", [ShardError("the ranks of the group disagree about a step"), ShardError("a defect")]
)
async def test_an_error_that_is_no_loss_keeps_nothing(error: ShardError) -> None:
    shards, batcher = await served_over(error)
    assert shards.num_asked == 0
    assert metric(batcher, RECOMPUTED)
    assert metric(batcher, DROPPED) == {}


async def test_a_hang_while_an_epoch_begins_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "REOPEN_SECONDS", 0.0)

    hangs = iter([True])

    def hang(stored: StoredBlocks) -> StoredBlocks:
        if next(hangs, False):
            raise ShardHung("a shard does not report its blocks")
        return stored

    shards, batcher = await served_over(LOST, hang)
    assert shards.num_asked == 1
    assert metric(batcher, RECOMPUTED)
    opened = [each.open.life for each in shards.shard.steps if each.HasField("open")]
    assert len(set(opened)) == len(opened) == 2


async def test_a_second_failure_in_the_search_for_poison_keeps_nothing() -> None:
    shards = StoringShards()
    batcher = new_batcher(shards, shards.shard, max_batch_size=4, max_batch_prefill_tokens=32)
    async with running(batcher):
        streams = [batcher.submit(request([i, 5, 5, 5, 5], 12)) for i in range(3)]
        for _ in range(5):
            await next_token(streams[0])
        shards.error = LOST
        while shards.num_asked == 0:
            await asyncio.sleep(0)
        # No step of the new epoch is answered.
        shards.error = LOST
        for stream in streams[1:]:
            await collect(stream)
        await collect(streams[0])
    assert shards.num_asked == 1
    assert metric(batcher, RECOMPUTED)
    assert not batcher._recovery.quarantine.to_json()
