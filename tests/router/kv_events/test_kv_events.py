"""Events over real sockets and their recorder: a reference subscriber, a gap, and a late subscriber."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from millrace_router.kv_events.publisher import EventPublisher, Replays
from millrace_router.kv_events.recorder import EventRecorder, block_hash
from millrace_router.request.block_hashes import BlockHashes
from millrace_router.scheduler.prefix_cache import PrefixCache
from millrace_testing.kv_events.cache_life import BLOCK_SIZE, BlockIndex, CacheLife

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed")


SECONDS = 20
ANY_PORT = "tcp://127.0.0.1:*"
END = b"\xff" * 8


@contextmanager
def publishing() -> Iterator[EventPublisher]:
    publisher = EventPublisher(ANY_PORT, replay_address=ANY_PORT, topic="kv@here@model")
    try:
        yield publisher
    finally:
        publisher.close()


class Subscriber:
    """A SUB socket, and a DEALER socket for what it missed."""

    def __init__(self, publisher: EventPublisher, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(publisher.replay_address)
        self._sub = self._context.socket(zmq.SUB)
        for one in (self._replay, self._sub):
            one.setsockopt(zmq.RCVTIMEO, SECONDS * 1000)
        self._sub.subscribe(topic)
        self._sub.connect(publisher.address)

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def next(self) -> tuple[bytes, int, Any]:
        """Wait for a message: topic, number, batch."""
        topic, number, payload = self._sub.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgpack.unpackb(payload)

    def replay(self, since: int) -> list[tuple[int, Any]]:
        """Ask for the batches from a number on."""
        self._replay.send_multipart([b"", since.to_bytes(8, "big")])
        answers: list[tuple[int, Any]] = []
        while True:
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return answers
            answers.append((int.from_bytes(number, "big"), msgpack.unpackb(payload)))


def connected(publisher: EventPublisher, subscriber: Subscriber) -> int:
    """Publish empty batches until one arrives; its number."""
    subscriber._sub.setsockopt(zmq.RCVTIMEO, 50)
    for _ in range(SECONDS * 20):
        publisher.publish([0.0, [], 0])
        try:
            number = subscriber.next()[1]
        except zmq.Again:
            continue
        subscriber._sub.setsockopt(zmq.RCVTIMEO, SECONDS * 1000)
        return number
    pytest.fail("no message arrived")


def test_messages_have_a_topic_a_number_and_a_batch() -> None:
    with publishing() as publisher, Subscriber(publisher, b"kv@") as subscriber:
        number = connected(publisher, subscriber)
        batch = [1.5, [["BlockRemoved", [2**64 - 1], "GPU"], ["AllBlocksCleared"]], 0]
        publisher.publish(batch)
        topic, found, received = subscriber.next()
        while found == number or not received[1]:
            topic, found, received = subscriber.next()
        assert topic == b"kv@here@model"
        assert received == batch


def test_an_index_over_the_wire_knows_the_cache_after_a_gap_and_a_late_start() -> None:
    recorder = EventRecorder(BLOCK_SIZE)
    life = CacheLife(recorder, seed=2)

    def live(steps: int) -> None:
        for _ in range(steps):
            life.step()
            batch = recorder.take()
            if batch is not None:
                publisher.publish(batch)

    with publishing() as publisher:
        live(300)
        with Subscriber(publisher) as subscriber:
            index, expected = BlockIndex(BLOCK_SIZE), 0
            number = connected(publisher, subscriber)
            live(300)
            # The end of what was published so far.
            publisher.publish([1.0, [], 0])
            while subscriber.next()[2] != [1.0, [], 0]:
                pass
            # What came before it subscribed is a gap, which a replay fills.
            for found, batch in subscriber.replay(expected):
                assert found == expected
                index.apply(batch[1])
                expected = found + 1
            assert expected > number
            assert index.contents() == life.contents()
            life.begin_epoch()
            live(100)
            publisher.publish([0.0, [], 0])
            while True:
                _, found, batch = subscriber.next()
                if found < expected:
                    continue
                assert found == expected
                index.apply(batch[1])
                expected += 1
                if not batch[1]:
                    break
            assert index.contents() == life.contents()


def test_slow_readers_do_not_delay_the_publisher() -> None:
    with publishing() as publisher, Subscriber(publisher) as subscriber:
        connected(publisher, subscriber)
        payload = [0.0, [["BlockRemoved", list(range(1000)), "GPU"]], 0]
        for _ in range(2000):
            publisher.publish(payload)
        # The thread has taken them all, though the subscriber has read none.
        while len(subscriber.replay(0)) < 2000:
            pass


def test_malformed_questions_are_ignored() -> None:
    with publishing() as publisher, Subscriber(publisher) as subscriber:
        publisher.publish([0.0, [], 0])
        for frames in ([b""], [b"", b"short"], [b"x", b"\0" * 8], [b"", b"\0" * 8, b"more"]):
            subscriber._replay.send_multipart(frames)
        assert [number for number, _ in subscriber.replay(0)] == [0]


def test_replays_are_bounded_in_number_and_in_bytes() -> None:
    few = Replays(max_batches=3)
    for number in range(5):
        few.add(number, b"x")
    assert few.since(0) == [(2, b"x"), (3, b"x"), (4, b"x")]
    assert few.since(4) == [(4, b"x")]
    small = Replays(max_bytes=10)
    for number in range(5):
        small.add(number, b"xxxx")
    assert [number for number, _ in small.since(0)] == [3, 4]


def test_an_address_in_use_is_an_error() -> None:
    with publishing() as publisher, pytest.raises(zmq.ZMQError):
        EventPublisher(publisher.address)


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


def test_blocks_with_a_salt_are_not_published() -> None:
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


def test_a_block_is_published_once_the_blocks_before_it_are() -> None:
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
