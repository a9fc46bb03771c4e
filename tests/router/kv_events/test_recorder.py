"""Events of a prefix cache, followed by an index that knows nothing else of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from millrace_router.kv_events.recorder import EventRecorder, block_hash
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_testing.kv_events.cache_life import BLOCK_SIZE, CacheLife
from millrace_testing.kv_events.index import BlockIndex

NUM_OPERATIONS = int(os.environ.get("MILLRACE_KV_EVENT_OPERATIONS", "3000"))


def keys_of(tokens: Sequence[int], **others: object) -> Sequence[bytes]:
    hashes = BlockHashes(2, keeps_content=True, **others)  # type: ignore[arg-type]
    return hashes.first(len(tokens) // 2, tokens, [])


def taken(recorder: EventRecorder) -> list[object]:
    batch = recorder.take()
    assert batch is not None
    at, events, rank = batch
    assert (at, rank) == (5.0, 0)
    assert isinstance(events, list)
    return events


def recorded() -> tuple[EventRecorder, PrefixCache]:
    recorder = EventRecorder(2, clock=lambda: 5.0)
    cache = recorder.new_cache()
    assert taken(recorder) == [["AllBlocksCleared"]]
    return recorder, cache


def test_blocks_of_a_chain_are_one_event_in_vllms_array() -> None:
    recorder, cache = recorded()
    first, second, third = keys_of([1, 2, 3, 4, 5, 6])
    for block, key in enumerate((first, second), start=1):
        cache.enter(key, block)
    names = [int.from_bytes(key[:8], "big") for key in (first, second, third)]
    stored = ["BlockStored", names[:2], None, [1, 2, 3, 4], 2, None, "GPU", None]
    assert taken(recorder) == [stored]
    cache.enter(third, 3)
    assert taken(recorder) == [
        ["BlockStored", names[2:], names[1], [5, 6], 2, None, "GPU", None],
    ]
    assert recorder.take() is None


def test_chains_of_adapters_are_apart_and_name_it() -> None:
    recorder, cache = recorded()
    (plain,) = keys_of([1, 2])
    (tuned,) = keys_of([1, 2], adapter="digest", adapter_name="tuned")
    cache.enter(plain, 1)
    cache.enter(tuned, 2)
    assert taken(recorder) == [
        ["BlockStored", [block_hash(plain)], None, [1, 2], 2, None, "GPU", None],
        ["BlockStored", [block_hash(tuned)], None, [1, 2], 2, None, "GPU", "tuned"],
    ]


def test_a_new_epoch_removes_blocks_by_name_and_clears_all() -> None:
    recorder, cache = recorded()
    keys = keys_of([1, 2, 3, 4])
    for block, key in enumerate(keys, start=1):
        cache.enter(key, block)
    taken(recorder)
    assert recorder.new_cache() is not cache
    names = [block_hash(key) for key in keys]
    assert taken(recorder) == [["BlockRemoved", names, "GPU"], ["AllBlocksCleared"]]


def test_blocks_with_a_salt_are_not_told_of() -> None:
    recorder, cache = recorded()
    for block, key in enumerate(keys_of([1, 2, 3, 4], salt=("secret",)), start=1):
        entered = cache.enter(key, block)
        assert entered is not None
        cache.unpin([entered])
    assert cache.evict() == 1
    recorder.new_cache()
    assert taken(recorder) == [["AllBlocksCleared"]]


def test_blocks_after_a_lost_one_are_removed_before_it() -> None:
    recorder, cache = recorded()
    keys = keys_of([1, 2, 3, 4])
    for block, key in enumerate(keys, start=1):
        entered = cache.enter(key, block)
        assert entered is not None
        cache.unpin([entered])
    taken(recorder)
    assert cache.evict() == 1
    names = [block_hash(key) for key in reversed(keys)]
    assert taken(recorder) == [["BlockRemoved", names, "GPU"]]


def test_a_block_is_told_of_once_those_before_it_are_there() -> None:
    recorder, cache = recorded()
    first, second, third = keys_of([1, 2, 3, 4, 5, 6])
    cache.enter(third, 3)
    assert recorder.take() is None
    cache.enter(first, 1)
    taken(recorder)
    cache.enter(second, 2)
    names = [block_hash(key) for key in (second, third)]
    assert taken(recorder) == [
        ["BlockStored", names, block_hash(first), [3, 4, 5, 6], 2, None, "GPU", None]
    ]


def test_only_the_first_event_of_a_batch_is_announced() -> None:
    recorder, cache = recorded()
    calls: list[None] = []
    recorder.on_event = lambda: calls.append(None)
    for block, key in enumerate(keys_of([1, 2, 3, 4]), start=1):
        cache.enter(key, block)
    assert len(calls) == 1
    recorder.take()
    cache.enter(keys_of([7, 8])[0], 3)
    assert len(calls) == 2


def test_an_index_that_follows_the_events_knows_the_cache() -> None:
    recorder = EventRecorder(BLOCK_SIZE)
    life, index, num_seen = CacheLife(recorder, seed=1), BlockIndex(BLOCK_SIZE), 0
    for number in range(NUM_OPERATIONS):
        life.step()
        batch = recorder.take()
        if batch is not None:
            events = batch[1]
            assert isinstance(events, list)
            index.apply(events)
        if number % 50 == 0:
            assert index.contents() == life.contents(), number
            num_seen = max(num_seen, len(index.blocks))
    assert num_seen > 10
