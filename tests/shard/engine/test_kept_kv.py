"""An engine goes on with the KV of one that is gone, and its warm-up leaves that KV alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from millrace_proto import generate_pb2 as pb
from millrace_shard.batch.step import BatchChange, Filter, StepFailure
from millrace_shard.engine import warmup
from millrace_shard.engine.kv_capacity import CapacityError
from millrace_shard.kernels.kv_store import Directory, KVStore
from millrace_shard.server.wire import directory_to_pb, step_from_pb
from millrace_shard.speculation.loading import Speculation
from millrace_testing.engines.engine_driver import (
    PROMPT,
    WARMUP,
    Driver,
    forward,
    generate,
    ints,
    tokens,
)
from millrace_testing.engines.fake_engine import BLOCK_SIZE, FakeModel, greedy

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")

LIFE = 9
KEY = bytes(range(32))


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


@pytest.fixture
def drivers(fd: int) -> Iterator[list[Driver]]:
    """Two engines, of which the second comes after the end of the first."""
    drivers = [Driver(kv_store=KVStore(fd)) for _ in range(2)]
    yield drivers
    for driver in drivers:
        driver.engine.close()


def directory(driver: Driver) -> Directory:
    directory = driver.engine.submit(driver.engine.directory).result(30)
    assert directory is not None
    return directory


def test_another_engine_goes_on_with_full_blocks(drivers: list[Driver]) -> None:
    first, second = drivers
    first.warm_up()
    first.open(LIFE)
    admitted = first.admit(0)
    (_, grown) = admitted
    found = [tokens(first.run(forward(admitted, chunks=[(0, 6)])))[0]]
    found += [tokens(first.run(forward(decodes=[0])))[0] for _ in range(2)]
    assert directory(first).blocks.tolist() == [block for _, block in grown]
    assert set(directory(first).owners.tolist()) == {1000}
    assert set(directory(first).generations.tolist()) == {first.epoch + 1}

    second.warm_up()
    second.open(LIFE)
    assert directory(second).blocks.tolist() == [block for _, block in grown]
    ids = [*PROMPT, *found]
    sequence, _ = second.admit(0, ids, cached_tokens=2 * BLOCK_SIZE)
    second.kernels.zeroed.clear()
    step = forward((sequence, grown), chunks=[(0, len(ids) - 2 * BLOCK_SIZE)])
    assert tokens(second.run(step))[0] == greedy(PROMPT, 4)[3]
    assert second.kernels.zeroed == [[block for _, block in grown[2:]]]


def test_seals_and_owners_are_in_the_directory(drivers: list[Driver]) -> None:
    driver = drivers[0]
    driver.warm_up()
    driver.open(LIFE)
    admitted = driver.admit(3)
    blocks = [block for _, block in admitted[1]]
    driver.run(forward(admitted, chunks=[(3, 6)]))
    sealing = BatchChange(sealed_blocks=ints(blocks[:1]), sealed_keys=(KEY,))
    driver.run(replace(forward(decodes=[3]), change=sealing))
    assert directory(driver).keys[0] == KEY
    driver.run(replace(forward(decodes=[3]), change=BatchChange(unsealed_blocks=ints(blocks[:1]))))
    assert set(directory(driver).keys) == {b""}
    assert set(directory(driver).owners.tolist()) == {1003}
    # A block that was shared already is not handed out to the row that shares it.
    driver.run(Filter(ints([3])))
    other, grown = driver.admit(4, cached_tokens=BLOCK_SIZE)
    grown[0] = (4, blocks[0])
    driver.run(forward((other, grown), chunks=[(4, 2)]))
    entries = directory(driver)
    owners = dict(zip(entries.blocks.tolist(), entries.owners.tolist(), strict=True))
    assert owners[blocks[0]] == 1003


@pytest.mark.parametrize(
    "change",
    [
        BatchChange(sealed_blocks=ints([1, 2]), sealed_keys=(KEY,)),
        BatchChange(sealed_blocks=ints([1]), sealed_keys=(KEY[1:],)),
        BatchChange(sealed_blocks=ints([0]), sealed_keys=(KEY,)),
        BatchChange(unsealed_blocks=ints([64])),
    ],
)
def test_a_seal_that_is_wrong_fails_its_step(drivers: list[Driver], change: BatchChange) -> None:
    driver = drivers[0]
    driver.warm_up()
    driver.open(LIFE)
    driver.run(forward(driver.admit(0), chunks=[(0, 6)]))
    outcome = driver.send(replace(forward(decodes=[0]), change=change)).result(30).outcome
    assert isinstance(outcome, StepFailure)
    assert "sealed" in outcome.message


def test_checksums_leave_out_what_a_draft_model_may_still_write(fd: int) -> None:
    speculation = Speculation(max_draft_tokens=1, draft=FakeModel())
    driver = Driver(kv_store=KVStore(fd, verifies=True), speculation=speculation)
    driver.warm_up()
    driver.open(LIFE)
    admitted = driver.admit(0)
    block = admitted[1][0][1]
    driver.run(forward(admitted, chunks=[(0, 6)]))
    change = BatchChange(sealed_blocks=ints([block]), sealed_keys=(KEY,))
    driver.run(replace(forward(decodes=[0]), change=change))
    assert KEY in directory(driver).keys
    store = driver.engine.loaded.kv_store
    assert store is not None
    *_, values, draft_keys, draft_values = store._tensors
    for each, is_kept in ((draft_keys, True), (draft_values, True), (values, False)):
        each[block].numpy()[:] = 3
        assert (KEY in directory(driver).keys) is is_kept
    driver.engine.close()


@pytest.mark.parametrize("life", [0, LIFE + 1])
def test_an_epoch_with_other_books_begins_with_nothing(drivers: list[Driver], life: int) -> None:
    driver = drivers[0]
    driver.warm_up()
    driver.open(LIFE)
    generate(driver, 0, 3)
    assert len(directory(driver).blocks)
    driver.open(life)
    assert (directory(driver).life, len(directory(driver).blocks)) == (life, 0)


def test_a_warm_up_with_other_limits_leaves_kept_kv_alone(drivers: list[Driver]) -> None:
    driver = drivers[0]
    driver.warm_up()
    driver.open(LIFE)
    generate(driver, 0, 3)
    before = directory(driver)
    values = [each.clone() for layer in driver.runner._cache for each in layer.by_block]
    driver.engine.warm_up(replace(WARMUP, max_batch_size=3, num_blocks=64)).result(30)
    assert directory(driver).blocks.tolist() == before.blocks.tolist()
    after = [each for layer in driver.runner._cache for each in layer.by_block]
    for each, former in zip(after, values, strict=True):
        assert torch.equal(each[1:].nan_to_num(), former[1:].nan_to_num())


def test_kept_kv_counts_as_free_memory(
    drivers: list[Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = drivers
    first.warm_up()
    first.open(LIFE)
    generate(first, 0, 3)
    store = first.engine.loaded.kv_store
    assert store is not None
    needed = first.engine.loaded.cache_shape().bytes_for(63 * BLOCK_SIZE)
    assert store.resident_bytes > needed
    monkeypatch.setattr(warmup, "available_memory", lambda: 0)
    for each in (second, Driver()):
        each.engine._limits = replace(each.engine._limits, kv_memory=None)
    request = replace(WARMUP, num_blocks=64)
    assert second.engine.warm_up(request).result(30).has_kv_store
    other = Driver()
    other.engine._limits = replace(other.engine._limits, kv_memory=None)
    with pytest.raises(CapacityError):
        other.engine.warm_up(request).result(30)
    other.engine.close()


def test_the_wire_has_what_the_store_is_asked_and_answers(drivers: list[Driver]) -> None:
    driver, largest = drivers[0], (1 << 64) - 1
    driver.warm_up()
    message = pb.StepRequest(epoch=driver.epoch + 1, open=pb.Open(life=largest))
    driver.engine.step(step_from_pb(message)).result(30)
    driver.epoch += 1
    admitted = driver.admit(0)
    block = admitted[1][0][1]
    driver.run(forward(admitted, chunks=[(0, 6)]))
    change = pb.BatchChange(sealed_blocks=[block], sealed_keys=[KEY], unsealed_blocks=[block + 1])
    decode = pb.Decode(change=change, decode_slots=[0])
    driver.run(step_from_pb(pb.StepRequest(decode=decode)).work)
    answer = directory_to_pb(directory(driver))
    assert answer.life == largest
    assert answer.blocks[0] == block
    assert answer.keys[0] == KEY
    assert set(answer.keys[1:]) == {b""}
    assert set(answer.owners) == {1000}
    assert set(answer.generations) == {driver.epoch + 1}
    assert directory_to_pb(None) == pb.BlocksResponse()
