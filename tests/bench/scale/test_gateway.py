"""The choice of each policy, on cases that are counted by hand."""

from __future__ import annotations

from collections import Counter

from bench.scale.cache_index import CacheIndex, IndexedCache
from bench.scale.gateway import (
    Gateway,
    KvAware,
    LeastLoaded,
    PrefixHash,
    Ring,
    RoundRobin,
    Ticket,
    beginning,
)

from millrace.simulate.simulated_request import Arrival


def ticket(number: int = 0, *, group: str = "", tokens: int = 100) -> Ticket:
    return Ticket(Arrival(0.0, tokens, 10, group=group), number, 0.0)


def sent(gateway: Gateway, asked: Ticket) -> Ticket:
    asked.replica = gateway.choose(asked)
    gateway.sent(asked)
    return asked


def places(gateway: Gateway, count: int) -> list[int]:
    return [sent(gateway, ticket(number)).replica for number in range(count)]


def test_requests_go_round_past_those_that_are_down() -> None:
    gateway = RoundRobin(3, first=2)
    assert places(gateway, 4) == [2, 0, 1, 2]
    gateway.set_up(0, is_up=False)
    assert places(gateway, 3) == [1, 2, 1]
    gateway.set_up(0, is_up=True)
    assert places(gateway, 3) == [2, 0, 1]


def test_the_least_loaded_gets_the_next() -> None:
    gateway = LeastLoaded(3)
    one, two, three = (sent(gateway, ticket(number)) for number in range(3))
    assert [one.replica, two.replica, three.replica] == [0, 1, 2]
    gateway.left(two)
    assert sent(gateway, ticket()).replica == 1
    gateway.left(three)
    gateway.set_up(2, is_up=False)
    assert sent(gateway, ticket()).replica in (0, 1)


def test_a_beginning_stays_with_its_replica_until_the_bound() -> None:
    gateway = PrefixHash(4, ring=Ring(4), balance_factor=2.0)
    home = gateway.choose(ticket(group="a"))
    counts = Counter(sent(gateway, ticket(group="a")).replica for _ in range(8))
    # At most twice the mean: after n requests no more than ceil(2 * n / 4).
    assert counts[home] == 4
    assert set(counts) > {home}
    free = PrefixHash(4, ring=Ring(4), balance_factor=float("inf"))
    assert {sent(free, ticket(group="a")).replica for _ in range(8)} == {home}


def test_the_hash_takes_2048_tokens() -> None:
    def begins(*chain: int, tokens: int = 512) -> bytes:
        return beginning(Arrival(0.0, len(chain) * tokens, 1, chain=chain, chain_tokens=tokens), 0)

    assert begins(1, 2, 3, 4, 5) == begins(1, 2, 3, 4, 6)
    assert begins(1, 2, 3, 4, 5) != begins(1, 2, 3, 7, 5)
    assert begins(*range(128), 500, tokens=16) == begins(*range(128), 600, tokens=16)
    assert begins(0, 1) != begins(0, 2)
    short = [Arrival(0.0, 80, 1, chain=(1, 2, 3, 4, last), chain_tokens=16) for last in (5, 6)]
    assert beginning(short[0], 0, 64) == beginning(short[1], 0, 64)
    assert beginning(short[0], 0) != beginning(short[1], 0)
    assert begins(5) == begins(5)


def kv_aware(index: CacheIndex, keys: list[bytes]) -> KvAware:
    return KvAware(
        3, index=index, keys_of=lambda _: keys, block_size=16, balance_factor=float("inf")
    )


def test_a_request_goes_where_the_fewest_tokens_are_left_to_compute() -> None:
    index, keys = CacheIndex(), [b"a/0", b"a/1", b"a/2"]
    first, second = IndexedCache(index, 1), IndexedCache(index, 2)
    for place, key in enumerate(keys):
        first.enter(key, place)
        if place:
            second.enter(key, place)
    # The second replica lacks the beginning, so the rest is worth nothing.
    assert index.num_held(keys, 3) == [0, 3, 0]
    gateway = kv_aware(index, keys)
    one = sent(gateway, ticket(tokens=60))
    assert (one.replica, one.num_uncached) == (1, 12)
    two = sent(gateway, ticket(tokens=60))
    assert two.replica == 1
    # 36 tokens are pending there and 48 cached: 24 + 60 - 48 is still less than 60.
    gateway._pending[1] = 49
    assert sent(gateway, ticket(tokens=60)).replica != 1
    gateway.began(one)
    assert gateway._pending[1] == 49 - 12
    gateway.left(one)
    assert gateway._pending[1] == 49 - 12


def test_the_index_knows_what_is_evicted_and_what_is_lost() -> None:
    index, keys = CacheIndex(), [b"a/0", b"a/1"]
    cache = IndexedCache(index, 0)
    pins = [cache.enter(key, place) for place, key in enumerate(keys)]
    cache.unpin([pin for pin in pins if pin is not None])
    assert index.num_held(keys, 2) == [2, 0]
    cache.evict()
    assert index.num_held(keys, 2) == [1, 0]
    cache.lose_all()
    assert index.num_held(keys, 2) == [0, 0]
