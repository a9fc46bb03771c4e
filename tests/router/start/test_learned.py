"""What a router leaves for the next one: whole or not at all, and of the same shards."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from millrace_router.config import RouterConfig
from millrace_router.prediction.step_load import StepLoad
from millrace_router.recovery.launcher_channel import LauncherChannel
from millrace_router.request.request import ValidRequest
from millrace_router.start.learned import HEADER_BYTES, SLOT_BYTES, StateFile
from millrace_router.start.running import Running, start
from millrace_testing.router.fake_router import collect, tiny_tokenizer
from millrace_testing.shards.fake_shard import FakeShard, serve_fake_shard

POISON = ValidRequest(input_ids=(5, 6, 7), max_new_tokens=6)


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def test_the_last_content_is_read_whatever_came_before(fd: int) -> None:
    assert StateFile(fd).read() == b""
    for content in (b"long" * 1000, b"", b"short", b"longer"):
        file = StateFile(fd)
        file.read()
        file.write(content)
        assert StateFile(fd).read() == content


@given(st.integers(0, 1), st.integers(0, HEADER_BYTES + 47), st.integers(1, 255))
def test_a_damaged_slot_leaves_the_other_one(slot: int, place: int, change: int) -> None:
    fd = os.memfd_create("test")
    try:
        file, contents = StateFile(fd), [b"second" * 8, b"first!" * 8]
        for content in reversed(contents):
            file.write(content)
        place += SLOT_BYTES * slot
        (byte,) = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([byte ^ change]), place)
        with capture_logs() as logs:
            following = StateFile(fd)
            assert following.read() == contents[1 - slot]
        assert ["cannot be read" in line["event"] for line in logs] == [True]
        following.write(b"third")
        assert StateFile(fd).read() == b"third"
    finally:
        os.close(fd)


@given(st.binary(min_size=1, max_size=100))
def test_a_foreign_file_is_ignored(content: bytes) -> None:
    fd = os.memfd_create("test")
    try:
        os.write(fd, content)
        assert StateFile(fd).read() == b""
    finally:
        os.close(fd)


def test_a_descriptor_that_is_no_file_keeps_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, capture_logs() as logs:
        file = StateFile(ours.fileno())
        file.write(b"content")
        assert file.read() == b""
    assert [line["log_level"] for line in logs] == ["warning", "warning"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer()._rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "fake"}')
    return tmp_path


@asynccontextmanager
async def router(
    folder: Path,
    shard: FakeShard,
    *,
    fd: int,
    life: int = 1,
    ends_in_order: bool = False,
    **flags: Any,
) -> AsyncIterator[Running]:
    """A router that has started; unless it `ends_in_order`, it leaves no more than one that is killed."""
    address, (launcher, theirs) = f"unix:{folder}/shard", socket.socketpair()
    launcher.sendall(b'{"event": "ready", "life": %d}\n' % life)
    config = RouterConfig(
        model_folder=folder,
        shard_addresses=(address,),
        max_batch_prefill_tokens=64,
        supervisor_fd=theirs.detach(),
        state_fd=fd,
        **flags,
    )
    with launcher, serve_fake_shard(address, shard):
        running = await start(config)
        # The first writing.
        await asyncio.sleep(0)
        try:
            yield running
        finally:
            content = os.pread(fd, 2 * SLOT_BYTES, 0)
            await running.stop_batcher()
            await running.close()
            if not ends_in_order:
                os.pwrite(fd, content, 0)


def num_prompt_tokens(shard: FakeShard) -> int:
    """Prompt tokens that the shard has received."""
    return sum(
        len(sequence.input_ids) for step in shard.steps for sequence in step.prefill.change.admitted
    )


async def test_a_restarted_router_measures_nothing_and_predicts_what_the_last_one_did(
    folder: Path, fd: int
) -> None:
    shard, load = FakeShard(num_blocks=600, max_batch_size=256), StepLoad(decodes=7, context=70)
    async with router(folder, shard, fd=fd) as running:
        assert running.services.cost is not None
        seconds = running.services.cost.seconds(load)
        num_measured = num_prompt_tokens(shard)
    assert num_measured > 0
    async with router(folder, shard, fd=fd) as running:
        assert running.services.cost is not None
        assert running.services.cost.seconds(load) == seconds
        assert num_prompt_tokens(shard) == num_measured


@pytest.mark.parametrize("change", [{"life": 2}, {"max_batch_size": 5}])
async def test_costs_of_other_shards_or_flags_are_forgotten_and_the_quarantine_is_not(
    folder: Path, fd: int, change: dict[str, Any]
) -> None:
    shard = FakeShard(num_blocks=600, max_batch_size=256)
    async with router(folder, shard, fd=fd) as running:
        running.services.quarantine.add(POISON, num_generated=0, reason="lost")
        num_measured = num_prompt_tokens(shard)
    async with router(folder, shard, fd=fd, **change) as running:
        assert num_prompt_tokens(shard) > num_measured
        assert running.services.quarantine.refuses(POISON)
        assert not running.services.quarantine.refuses(replace(POISON, max_new_tokens=5))


async def test_a_router_that_ends_in_order_leaves_the_lengths_of_its_answers(
    folder: Path, fd: int
) -> None:
    shard = FakeShard(num_blocks=600, max_batch_size=256)
    async with router(folder, shard, fd=fd, ends_in_order=True) as running:
        await collect(running.services.infer._batcher.submit(replace(POISON, ignore_eos=True)))
    async with router(folder, shard, fd=fd):
        # It has written what it has read.
        kept = orjson.loads(StateFile(fd).read())
    assert kept["traffic"]["answers"] == [[6, False]]


async def test_each_new_start_of_the_shards_is_reported_once() -> None:
    ours, theirs = socket.socketpair()
    launcher = LauncherChannel(theirs.detach())
    receiving = asyncio.create_task(launcher.run())
    kept, seen = asyncio.Event(), list[int]()

    def keep() -> None:
        seen.append(launcher.life)
        kept.set()

    launcher.on_new_life = keep
    with ours:
        for life in (1, 1, 2):
            ours.sendall(b'{"event": "ready", "life": %d}\n' % life)
        while len(seen) < 2:
            kept.clear()
            await kept.wait()
    await receiving
    assert seen == [1, 2]
