"""The batcher with late planning, while the next plan is delayed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millrace_router.errors import QueueExpired
from millrace_router.request.entry import entry_of
from millrace_router.request.request import SchedulingParameters
from millrace_testing.router.fake_router import collect, ids_of, request, running
from millrace_testing.shards.hash_tokens import expected_tokens
from millrace_testing.shards.held_shards import (
    AlwaysOpen,
    NeverOpen,
    admissions,
    late_batcher,
    turns,
)


async def test_who_comes_while_the_next_step_is_open_is_in_it() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        batcher.submit(request([1], 9))
        await turns()
        assert admissions(shard) == [1]
        batcher.submit(request([2], 9))
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 1]
        batcher.submit(request([3], 9))
        await turns()
        assert admissions(shard) == [1, 1], "two steps are in flight"
        shards.release()
        await turns()
        assert admissions(shard) == [1, 1], "the third one stays open"
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 1, 1]


async def test_shards_that_are_done_early_get_the_next_step_at_once() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 9))
        await turns()
        for number in range(1, 9):
            assert len(admissions(shard)) == number
            shards.release()
            await turns()
        shards.release()
        assert ids_of(await collect(stream)) == expected_tokens([1], 9)


async def test_a_failure_while_the_next_step_is_open_is_noticed_at_once() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        shard.fail_next = "the device caught fire"
        stream = batcher.submit(request([1], 2))
        await turns()
        for _ in range(3):
            shards.release()
            await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 2)


async def test_a_step_that_only_drops_rows_says_nothing_of_how_late_is_too_late() -> None:
    late = AlwaysOpen()
    batcher, shards, shard = late_batcher(late)
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 1))
        await turns()
        shards.let_time_pass()
        await turns()
        shards.release()
        await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 1)
        assert admissions(shard) == [1, 0]
        shards.release()
        await turns()
        assert not shards.num_held
    assert late.learned == []


async def test_steps_that_are_planned_at_once_tell_of_the_time_there_was_to_spare() -> None:
    late = NeverOpen()
    batcher, shards, _ = late_batcher(late)
    async with running(batcher):
        await turns()
        stream = batcher.submit(request([1], 3))
        await turns()
        for _ in range(4):
            shards.release()
            await turns()
        await collect(stream)
    assert late.learned
    assert not any(late.learned)


async def test_who_has_waited_for_too_long_while_the_next_step_is_open_is_not_in_it() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        batcher.submit(request([1], 9))
        await turns()
        hasty = batcher.submit(
            replace(request([2], 9), scheduling=SchedulingParameters(max_queue_seconds=1e-9))
        )
        shards.let_time_pass()
        await turns()
        assert admissions(shard) == [1, 0]
        with pytest.raises(QueueExpired):
            await collect(hasty)


async def test_the_metrics_tell_of_a_step_while_the_next_one_is_open() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        batcher.submit(request([1], 9))
        await turns()
        assert admissions(shard) == [1]
        metrics = batcher._metrics._metrics
        assert metrics.batch_current_size.value == metrics.requests_running.value == 1
        assert metrics.queue_size.value == metrics.requests_waiting.value == 0
        assert metrics.kv_blocks_in_use.value == 1
        batcher.submit(request([2], 9))
        assert metrics.queue_size.value == metrics.requests_waiting.value == 1
        shards.let_time_pass()
        await turns()
        assert metrics.requests_running.value == 2
        assert metrics.requests_waiting.value == 0
        assert metrics.kv_blocks_in_use.value == 2


async def test_the_metrics_tell_of_the_epoch_after_a_failed_one() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        shard.fail_next = "the device caught fire"
        stream = batcher.submit(request([1], 3))
        await turns()
        metrics = batcher._metrics._metrics
        while metrics.recoveries.labels(reason="failed").value == 0:
            shards.release()
            await turns()
        assert metrics.requests_running.value == metrics.kv_blocks_in_use.value == 1
        for _ in range(6):
            shards.release()
            await turns()
        assert ids_of(await collect(stream)) == expected_tokens([1], 3)
        assert metrics.requests_running.value == metrics.kv_blocks_in_use.value == 0


async def test_no_step_follows_when_the_last_suspect_leaves_while_it_is_open() -> None:
    batcher, shards, shard = late_batcher()
    async with running(batcher):
        await turns()
        shard.fail_next = "the device caught fire"
        streams = [batcher.submit(request([i], 9)) for i in (1, 2)]
        await turns()
        shard.fail_next = "the device caught fire again"
        for _ in range(2):
            shards.release()
            await turns()
        (suspect,) = batcher._planner.running
        num_steps = len(shard.steps)
        entry_of(suspect.entry).stream.close()
        shards.let_time_pass()
        await turns()
        assert len(shard.steps) == num_steps
        shards.release()
        await turns()
        (other,) = batcher._planner.running
        assert {entry_of(row.entry).stream for row in (suspect, other)} == set(streams)
