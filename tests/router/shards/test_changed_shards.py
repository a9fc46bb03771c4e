"""Restarted shards that differ from the first ones get no step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.shards.errors import ShardChanged
from millrace_router.shards.group import ShardGroup
from millrace_router.shards.step_channel import StepChannel
from millrace_testing.router.fake_router import collect, ids_of, new_batcher, request, running
from millrace_testing.shards.fake_shard import FakeShard, continuation, serve_fake_shard

SECONDS = 30


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/shard"


def shard_with(
    *, attention: str = "cpu", block_size: int = 4, deterministic: bool = True, is_warm: bool = True
) -> FakeShard:
    shard = FakeShard(block_size=block_size)
    shard.attention, shard.deterministic, shard.is_warm = attention, deterministic, is_warm
    return shard


async def warm_up(shards: StepChannel) -> None:
    await shards.group.info()
    await shards.group.warm_up(
        max_batch_prefill_tokens=16,
        max_batch_size=4,
        max_concurrent_requests=8,
        max_input_tokens=None,
        max_total_tokens=20,
        max_batch_total_tokens=None,
    )


@pytest.mark.parametrize(
    ("attention", "block_size", "words"),
    [("plain", 2, "another KV capacity"), ("plain", 4, "plain attention")],
)
async def test_no_epoch_begins_on_other_shards_however_often_it_is_tried(
    address: str, attention: str, block_size: int, words: str
) -> None:
    shards = StepChannel(ShardGroup([address]))
    changed = shard_with(attention=attention, block_size=block_size, is_warm=False)
    with serve_fake_shard(address, shard_with()):
        await warm_up(shards)
        await shards.open()
    with serve_fake_shard(address, changed):
        # The second time, the shards are warmed up.
        for _ in range(2):
            with pytest.raises(ShardChanged, match=words):
                await shards.open()
    assert not changed.steps
    same = shard_with(is_warm=False)
    with serve_fake_shard(address, same):
        await shards.open()
    assert same.is_warm
    await shards.close()


async def test_other_kernels_may_take_over_where_no_bits_are_promised(address: str) -> None:
    shards = StepChannel(ShardGroup([address]))
    with serve_fake_shard(address, shard_with(deterministic=False)):
        await warm_up(shards)
        await shards.open()
    changed = shard_with(attention="plain", deterministic=False, is_warm=False)
    with serve_fake_shard(address, changed):
        await shards.open()
    await shards.close()


async def test_a_restart_is_asked_for_until_they_are_as_before(address: str) -> None:
    changed = shard_with(block_size=2, is_warm=False)
    asked = asyncio.Event()

    class Launcher(LauncherChannel):
        @property
        def is_open(self) -> bool:
            return True

        def restart_shards(self, reason: str) -> None:
            assert "another KV capacity" in reason
            asked.set()

    shards, first = StepChannel(ShardGroup([address])), shard_with()
    batcher = new_batcher(shards, first, launcher=Launcher(None))
    with serve_fake_shard(address, first):
        await warm_up(shards)
    async with running(batcher), asyncio.timeout(SECONDS):
        stream = batcher.submit(request([1, 2, 3], 5))
        with serve_fake_shard(address, changed):
            await asked.wait()
        with serve_fake_shard(address, shard_with(is_warm=False)):
            assert ids_of(await collect(stream)) == continuation([1, 2, 3], 5)
    assert not changed.steps
    await shards.close()
