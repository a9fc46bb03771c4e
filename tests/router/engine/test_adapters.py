"""The batcher with adapters: waits, turns, failures of loads and of shards, and the bytes of every stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from millrace_router.adapters.residency import Residency
from millrace_router.adapters.slots import SlotState
from millrace_router.engine.adapter_loading import AdapterLoading
from millrace_router.engine.batcher import Batcher
from millrace_router.errors import (
    AdapterTooLarge,
    AdapterUnavailable,
    QueueExpired,
    QueueTooLong,
    RouterError,
    ShuttingDown,
)
from millrace_router.request.adapter import AdapterVersion
from millrace_router.request.request import SchedulingParameters, ValidRequest
from millrace_router.request.token_stream import TokenStream
from millrace_router.scheduler.queue import WaitingQueue
from millrace_testing.adapters.fake_adapters import FakeAdapters, version_of
from millrace_testing.router.fake_router import (
    DirectShards,
    collect,
    ids_of,
    new_batcher,
    next_token,
    request,
    running,
)
from millrace_testing.shards.hash_shard import HashShard
from millrace_testing.shards.hash_tokens import expected_tokens

VERSIONS = [version_of(f"adapter {number}") for number in range(40)]
ONE, TWO, THREE = VERSIONS[:3]


def new_shard(*, max_adapters: int = 8, num_pages: int = 100) -> HashShard:
    adapters = FakeAdapters(max_adapters=max_adapters, num_pages=num_pages)
    return HashShard(num_blocks=200, adapters=adapters)


def expected(ids: list[int], count: int, version: AdapterVersion | None) -> list[int]:
    return expected_tokens(ids, count, adapter="" if version is None else version.digest)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until `condition` holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


def residency_of(batcher: Batcher) -> Residency:
    assert isinstance(batcher._adapters, AdapterLoading)
    return batcher._adapters._admission.residency


def is_empty(batcher: Batcher) -> bool:
    """Whether no request or sequence uses a place."""
    slots = list(residency_of(batcher))
    return not any(p.num_users for p in slots) and not batcher._adapters.num_waiting


async def test_forty_adapters_share_eight_slots() -> None:
    shard, random = new_shard(), Random(7)
    batcher = new_batcher(DirectShards(shard), shard, cycle_seconds=0.0)
    asked = [
        ([random.randrange(90) for _ in range(random.randint(1, 20))], random.randint(1, 30), v)
        for v in [*VERSIONS, *random.choices([None, *VERSIONS], k=80)]
    ]
    async with running(batcher):
        outputs = []
        for start in range(0, len(asked), 30):
            streams = [batcher.submit(request(*each)) for each in asked[start : start + 30]]
            outputs += await asyncio.gather(*map(collect, streams))
        await until(lambda: is_empty(batcher))
    for each, events in zip(asked, outputs, strict=True):
        assert ids_of(events) == expected(*each)
    assert shard.violation is None
    assert shard.adapters.num_read.total() > 40, "no adapter came back"


async def test_steps_that_fail_and_clients_that_leave_change_no_bytes() -> None:
    shard, random = new_shard(max_adapters=3), Random(3)
    shards = DirectShards(shard)
    batcher = new_batcher(shards, shard, cycle_seconds=0.0)

    async def client(number: int) -> None:
        ids, count = [number % 90, 5, 6], random.randint(5, 40)
        version = random.choice([None, *VERSIONS[:9]])
        leaves_after = random.choice([None, None, 0, 3])
        stream = batcher.submit(request(ids, count, version))
        if leaves_after is None:
            assert ids_of(await collect(stream)) == expected(ids, count, version)
            return
        for token in expected(ids, leaves_after, version):
            event = await next_token(stream)
            assert event is not None
            assert event.token.id == token
        stream.close()

    async def fail_now_and_then() -> None:
        while True:
            for _ in range(random.randint(20, 60)):
                await asyncio.sleep(0)
            shard.fail_next = "the device is gone"
            if random.random() < 0.5:
                # Another process takes its place, with empty slots.
                shard.adapters.slots.clear()

    async with running(batcher):
        await collect(batcher.submit(request([1], 1)))
        failing = asyncio.create_task(fail_now_and_then())
        async with asyncio.timeout(30):
            await asyncio.gather(*(client(number) for number in range(60)))
        failing.cancel()
        await until(lambda: is_empty(batcher))


async def test_no_request_waits_behind_an_adapter_that_is_loading() -> None:
    shard = new_shard()
    shards = DirectShards(shard)
    gate = shards.held_loads[ONE.digest] = asyncio.Event()
    batcher = new_batcher(shards, shard)
    async with running(batcher):
        slow = batcher.submit(request([1, 2], 5, ONE))
        quick = [batcher.submit(request([3, 4], 5, version)) for version in (None, TWO)]
        for stream, version in zip(quick, (None, TWO), strict=True):
            assert ids_of(await collect(stream)) == expected([3, 4], 5, version)
        assert batcher.estimate(request([1], 1)).num_waiting == 1
        gate.set()
        assert ids_of(await collect(slow)) == expected([1, 2], 5, ONE)


async def test_a_request_that_waited_for_its_adapter_stays_ordered_by_age() -> None:
    shard = new_shard()
    shards = DirectShards(shard)
    gate = shards.held_loads[ONE.digest] = asyncio.Event()
    batcher = new_batcher(shards, shard, max_batch_size=1, max_batch_prefill_tokens=4)
    async with running(batcher):
        busy = batcher.submit(request([9], 60))
        await next_token(busy)
        first = batcher.submit(request([1, 2, 3], 2, ONE))
        second = batcher.submit(request([3, 4, 5], 2))
        gate.set()
        await until(lambda: residency_of(batcher).slot(ONE.digest) is not None)
        await until(lambda: batcher._adapters.num_waiting == 0)
        await asyncio.gather(collect(first), collect(second), collect(busy))
    admitted = [s for step in shard.steps for s in step.prefill.change.admitted]
    assert [len(s.input_ids) for s in admitted] == [1, 3, 3]
    assert [bool(s.adapter_slot) for s in admitted] == [False, True, False]


async def test_a_failed_load_ends_only_the_requests_for_that_adapter() -> None:
    shard = new_shard()
    shard.adapters.errors[ONE.digest] = "/secret/path: no such file"
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        bad = [batcher.submit(request([1], 5, ONE)) for _ in range(2)]
        good = batcher.submit(request([2], 5, TWO))
        for stream in bad:
            with pytest.raises(AdapterUnavailable, match="adapter 0") as caught:
                await collect(stream)
            assert "secret" not in str(caught.value)
            assert caught.value.retry_after_seconds
        with pytest.raises(AdapterUnavailable):
            batcher.submit(request([1], 5, ONE))
        assert ids_of(await collect(good)) == expected([2], 5, TWO)
        await until(lambda: residency_of(batcher).slot(ONE.digest) is None)


async def test_shards_without_memory_for_an_adapter_refuse_only_it() -> None:
    shard = new_shard(num_pages=2)
    batcher = new_batcher(DirectShards(shard), shard)
    # The shard counts more pages than the router knows of.
    shard.adapters.pages[ONE.digest] = 3
    async with running(batcher):
        with pytest.raises(AdapterTooLarge):
            batcher.submit(request([1], 1, version_of("huge", num_pages=3)))
        with pytest.raises(AdapterUnavailable):
            await collect(batcher.submit(request([1], 5, ONE)))
        assert ids_of(await collect(batcher.submit(request([2], 5, TWO)))) == expected([2], 5, TWO)


def test_the_capacity_of_each_rank_decides_about_pages() -> None:
    version = version_of("three", num_pages=3)
    assert version.num_pages({name: 1 << 16 for name, _ in version.num_slices}) == 3
    assert version.num_pages({name: 1 << 15 for name, _ in version.num_slices}) == 2


async def test_a_busy_adapter_makes_room_and_its_stream_goes_on_later() -> None:
    shard = new_shard(max_adapters=1)
    batcher = new_batcher(DirectShards(shard), shard, cycle_seconds=0.1)
    async with running(batcher):
        long_one = batcher.submit(request([1, 2], 300, ONE))
        await next_token(long_one)
        other = batcher.submit(request([1, 2], 300, TWO))
        events = await asyncio.gather(collect(long_one), collect(other))
    first = [event.token.id for event in events[0]]
    assert first == expected([1, 2], 300, ONE)[1:]
    assert ids_of(events[1]) == expected([1, 2], 300, TWO)


async def test_a_wait_ends_at_its_deadline_and_leaves_nothing_reserved() -> None:
    shard = new_shard()
    shards = DirectShards(shard)
    shards.held_loads[ONE.digest] = asyncio.Event()
    batcher = new_batcher(shards, shard)
    soon = SchedulingParameters(max_queue_seconds=0.15)
    async with running(batcher):
        stream = batcher.submit(
            ValidRequest(input_ids=(1,), max_new_tokens=1, adapter=ONE, scheduling=soon)
        )
        with pytest.raises(QueueExpired) as caught:
            await collect(stream)
        assert caught.value.retry_after_seconds
        assert is_empty(batcher)


async def test_a_predicted_wait_for_a_busy_adapter_refuses_at_once() -> None:
    shard = new_shard(max_adapters=1)
    batcher = new_batcher(DirectShards(shard), shard, cycle_seconds=50.0)
    async with running(batcher):
        busy = batcher.submit(request([1], 100, ONE))
        await next_token(busy)
        hasty = SchedulingParameters(max_queue_seconds=20.0)
        with pytest.raises(QueueTooLong) as caught:
            batcher.submit(
                ValidRequest(input_ids=(1,), max_new_tokens=1, adapter=TWO, scheduling=hasty)
            )
        assert (caught.value.retry_after_seconds or 0) > 30
        busy.close()


@pytest.mark.parametrize("is_waiting", [True, False], ids=["waiting", "running"])
async def test_a_shutdown_ends_every_request_once(is_waiting: bool) -> None:
    shard = new_shard()
    shards = DirectShards(shard)
    if is_waiting:
        shards.held_loads[ONE.digest] = asyncio.Event()
    batcher = new_batcher(shards, shard)
    async with running(batcher):
        stream = batcher.submit(request([1], 150, ONE))
        if is_waiting:
            await asyncio.sleep(0)
        else:
            await next_token(stream)
    with pytest.raises(ShuttingDown if is_waiting else RouterError):
        await collect(stream)


async def test_a_shard_that_is_lost_while_it_loads_gets_the_load_again() -> None:
    shard = new_shard()
    shards = DirectShards(shard)
    gate = shards.held_loads[ONE.digest] = asyncio.Event()
    batcher = new_batcher(shards, shard)
    async with running(batcher):
        base = batcher.submit(request([7], 100))
        await next_token(base)
        stream = batcher.submit(request([1, 2], 5, ONE))
        await asyncio.sleep(0)
        shards.lost = True
        gate.set()
        await asyncio.sleep(0)
        shard.fail_next = "killed"
        shards.lost = False
        assert ids_of(await collect(stream)) == expected([1, 2], 5, ONE)
        assert [event.token.id for event in await collect(base)] == expected([7], 100, None)[1:]


async def test_adapters_in_use_are_loaded_before_the_first_step_of_a_restarted_shard() -> None:
    shard = new_shard()
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        streams = [batcher.submit(request([1, 2], 40, version)) for version in VERSIONS[:8]]
        for stream in streams:
            await next_token(stream)
        shard.adapters.slots.clear()
        shard.fail_next = "killed"
        num_steps = []
        shard.adapters.on_load = lambda _: num_steps.append(shard._number)
        outputs = await asyncio.gather(*map(collect, streams))
    assert num_steps[:8] == [0] * 8
    for version, events in zip(VERSIONS, outputs, strict=False):
        assert [e.token.id for e in events] == expected([1, 2], 40, version)[1:]


async def test_a_file_that_is_gone_after_a_restart_ends_only_its_requests() -> None:
    shard = new_shard()
    batcher = new_batcher(DirectShards(shard), shard)
    async with running(batcher):
        streams: list[TokenStream] = []
        for version in (ONE, TWO, None):
            streams.append(batcher.submit(request([1, 2], 40, version)))
            await next_token(streams[-1])
        shard.adapters.slots.clear()
        shard.adapters.errors[ONE.digest] = "gone"
        shard.fail_next = "killed"
        with pytest.raises(AdapterUnavailable):
            await collect(streams[0])
        for stream, version in zip(streams[1:], (TWO, None), strict=True):
            assert [e.token.id for e in await collect(stream)][-5:] == expected(
                [1, 2], 40, version
            )[-5:]
        await until(lambda: is_empty(batcher))
    num_epochs = sum(step.HasField("open") for step in shard.steps)
    assert num_epochs == 2, "a request that has ended broke a step"


async def test_no_block_is_shared_between_adapters_versions_and_the_base() -> None:
    shard = new_shard()
    batcher = new_batcher(DirectShards(shard), shard)
    ids = [5] * 21
    others = [None, ONE, version_of(ONE.name, number=1), TWO]
    async with running(batcher):
        for version in others:
            stream = batcher.submit(request(ids, 4, version))
            assert ids_of(await collect(stream)) == expected(ids, 4, version)
        assert shard.num_hit == 0
        for version in others:
            stream = batcher.submit(request(ids, 4, version))
            assert ids_of(await collect(stream)) == expected(ids, 4, version)
    assert shard.num_hit == len(others) * 20
    assert shard.violation is None


async def test_a_slot_is_not_reused_while_a_step_that_names_it_is_in_flight() -> None:
    shard = new_shard(max_adapters=1)
    batcher = new_batcher(DirectShards(shard), shard, waiting=WaitingQueue())
    async with running(batcher):
        for number in range(12):
            stream = batcher.submit(request([number], 3, VERSIONS[number % 3]))
            if number % 2:
                await next_token(stream)
                stream.close()
            else:
                await collect(stream)
        await until(lambda: is_empty(batcher))
    assert shard.violation is None
    assert all(one.state is not SlotState.LOADING for one in residency_of(batcher))
