"""PrefixCache by itself: what is found, what is evicted first, what is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millrace_router.scheduler.prefix_cache import CachedBlock, PrefixCache

KEYS = [b"root", b"stem", b"leaf"]


def enter(cache: PrefixCache, keys: Sequence[bytes], first_block: int) -> list[CachedBlock]:
    """A sequence that computed all of `keys` itself and holds them."""
    blocks = [cache.enter(key, first_block + i) for i, key in enumerate(keys)]
    entered = [block for block in blocks if block is not None]
    assert len(entered) == len(keys)
    return entered


def blocks_of(cache: PrefixCache, keys: Sequence[bytes]) -> list[int]:
    return [found.block for found in cache.find(keys)]


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache()
    enter(cache, KEYS, 1)
    assert blocks_of(cache, [*KEYS, b"more"]) == [1, 2, 3]
    assert blocks_of(cache, KEYS[:2]) == [1, 2]
    assert blocks_of(cache, [b"other", *KEYS]) == []
    assert blocks_of(cache, [KEYS[0], b"other", KEYS[2]]) == [1]


def test_eviction_takes_leaves_before_their_parents() -> None:
    cache = PrefixCache()
    cache.unpin(enter(cache, KEYS, 1))
    assert [cache.evict(), cache.evict(), cache.evict()] == [3, 2, 1]
    assert cache.find(KEYS) == []
    with pytest.raises(KeyError):
        cache.evict()


def test_eviction_takes_the_chain_that_was_used_longest_ago() -> None:
    cache = PrefixCache()
    old, new = enter(cache, [b"a1", b"a2"], 1), enter(cache, [b"b1", b"b2"], 3)
    cache.unpin(old)
    cache.unpin(new)
    found = cache.find([b"a1"])
    cache.pin(found)
    cache.unpin(found)
    assert [cache.evict() for _ in range(4)] == [2, 4, 3, 1], "a hit renews what it covers alone"


def test_a_pinned_block_is_not_evicted_and_is_idle_only_when_the_last_holder_leaves() -> None:
    cache = PrefixCache()
    first = enter(cache, KEYS, 1)
    second = cache.find(KEYS[:2])
    cache.pin(second)
    cache.unpin(first)
    assert cache.num_idle == 1
    assert cache.evict() == 3
    cache.unpin(second)
    assert cache.num_idle == 2


def test_of_two_equal_blocks_the_one_that_is_held_stays() -> None:
    cache = PrefixCache()
    enter(cache, KEYS[:1], 1)
    assert cache.enter(KEYS[0], 9) is None
    assert blocks_of(cache, KEYS[:1]) == [1]
    assert cache.give_up(KEYS[0]) is None


def test_an_idle_block_can_be_given_up() -> None:
    cache = PrefixCache()
    cache.unpin(enter(cache, KEYS[:1], 1))
    assert cache.give_up(KEYS[0]) == 1
    assert (cache.num_idle, cache.find(KEYS)) == (0, [])
    assert cache.give_up(b"unknown") is None


def test_a_forgotten_block_is_not_found_and_is_free_once_no_sequence_holds_it() -> None:
    cache = PrefixCache()
    first = enter(cache, KEYS[:2], 1)
    second = cache.find(KEYS[:1])
    cache.pin(second)
    for block in first:
        cache.forget(block)
    assert cache.find(KEYS) == []
    again = enter(cache, KEYS[:1], 7)
    assert cache.unpin(first) == [2]
    assert cache.unpin(second) == [1]
    assert blocks_of(cache, KEYS) == [7], "what was computed anew under the same key stays"
    assert cache.unpin(again) == []


def test_a_key_is_expected_until_everybody_who_would_compute_it_is_gone() -> None:
    cache = PrefixCache()
    cache.expect(KEYS)
    cache.expect(KEYS[:1])
    cache.unexpect(KEYS)
    assert cache.expects(KEYS[0])
    assert not cache.expects(KEYS[1])
    cache.unexpect(KEYS[:1])
    assert not cache.expects(KEYS[0])
