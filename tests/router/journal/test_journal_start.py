"""A router with --journal: the header, the records, and errors at the start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace_router.config import RouterConfig
from millrace_router.journal.reader import Answered, Epoch, Sent, read_epochs
from millrace_router.journal.rotation import JournalFolder, journal_files
from millrace_router.request.request import ValidRequest
from millrace_router.start.running import start
from millrace_router.start.shards import StartupError
from millrace_testing.router.fake_router import collect, tiny_tokenizer
from millrace_testing.shards.fake_shard import FakeShard, continuation, serve_fake_shard


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer()._rust.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "fake"}')
    return tmp_path


def config(folder: Path, **values: Any) -> RouterConfig:
    return RouterConfig(
        model_folder=folder,
        model_id="my/model",
        revision="0123abc",
        shard_addresses=(f"unix:{folder}/shard",),
        max_batch_prefill_tokens=64,
        journal=folder / "journal",
        **values,
    )


async def serve(folder: Path, **values: Any) -> tuple[str, list[int]]:
    """Serve one request by a complete router; returns /metrics and the tokens."""
    asked = ValidRequest(input_ids=(5, 6, 7), max_new_tokens=6, ignore_eos=True)
    with serve_fake_shard(f"unix:{folder}/shard", FakeShard(num_blocks=600, max_batch_size=256)):
        running = await start(config(folder, **values))
        try:
            stream = running.services.infer._batcher.submit(asked)
            ids = [e.token.id for e in await collect(stream)]
            counter = running.services.metrics.journal_dropped_records
            return f"{counter.touched} {counter.value}", ids
        finally:
            await running.stop_batcher()
            await running.close()


def told(folder: Path) -> tuple[Epoch, list[Any]]:
    ((epoch, events),) = [(epoch, list(epoch.events)) for epoch in read_epochs(folder / "journal")]
    return epoch, events


async def test_it_records_what_it_serves_and_not_what_it_measures(folder: Path) -> None:
    dropped, ids = await serve(folder, journal_tokens=True, max_batch_size=7, fairness="tenant")
    assert dropped == "True 0.0"
    assert ids == continuation([5, 6, 7], 6)
    epoch, events = told(folder)
    admitted = [
        list(sequence.input_ids)
        for event in events
        if isinstance(event, Sent)
        for sequence in event.message.prefill.change.admitted
    ]
    assert admitted == [[5, 6, 7]]
    answers = [event.answer for event in events if isinstance(event, Answered)]
    assert [id_ for answer in answers for id_ in answer.ids][:6] == ids
    head = epoch.header
    assert (head.model_id, head.model_sha, head.keeps_tokens) == ("my/model", "0123abc", True)
    assert (head.shard.model_type, head.capacity.num_blocks) == ("fake", 600)
    assert head.warmup["max_batch_prefill_tokens"] == 64
    assert head.warmup["max_batch_size"] > 7
    assert "num_blocks" not in head.warmup
    assert head.settings["fairness"] == "tenant"
    assert head.settings["max_batch_prefill_tokens"] == 64
    assert head.settings["prefix_caching"] == "on"


async def test_token_ids_are_recorded_only_when_they_are_wanted(folder: Path) -> None:
    _, ids = await serve(folder)
    epoch, events = told(folder)
    assert not epoch.header.keeps_tokens
    answers = [event.answer for event in events if isinstance(event, Answered)]
    assert sum(count for answer in answers for count in answer.counts) >= len(ids) == 6
    assert not any(answer.ids for answer in answers)


async def test_each_life_of_the_router_begins_a_file(folder: Path) -> None:
    for _ in range(2):
        await serve(folder)
    assert len(journal_files(folder / "journal")) == 2
    lives = {epoch.header.life for epoch in read_epochs(folder / "journal")}
    assert len(lives) == 2


async def test_it_does_not_start_where_it_cannot_write(folder: Path) -> None:
    (folder / "journal").write_text("a file")
    with pytest.raises(StartupError, match="cannot keep a journal"):
        await start(config(folder))
    (folder / "journal").unlink()
    taken = JournalFolder(folder / "journal", max_bytes=1 << 20)
    with pytest.raises(StartupError, match="another router"):
        await asyncio.wait_for(start(config(folder)), 30)
    taken.close()
