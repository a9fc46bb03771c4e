"""Journals with adapters: their loads are recorded by digest, and replayed before the sequences that name them."""

from __future__ import annotations

from pathlib import Path

from millrace_router.journal.header import header_from_json, header_to_json
from millrace_router.journal.reader import AdapterChanged, read_events
from millrace_testing.router.journals import (
    BUDGETS,
    RecordedDriver,
    header,
    journal_in,
    new_shard,
    replayed,
    requests,
)


def record(folder: Path, *, fails: bool = False) -> RecordedDriver:
    """Run requests with adapters, of which the shard holds two at a time."""
    shard = new_shard(max_adapters=2)
    journal, writer, _ = journal_in(folder, header(shard))
    driver = RecordedDriver(BUDGETS, shard, journal)
    for number, asked in enumerate(requests(24, adapters=True)):
        driver.submit(asked)
        driver.turn()
        if fails and number == 12:
            shard.fail_next, driver.loses_adapters = "killed", True
    driver.run()
    driver.check_idle()
    writer.close()
    return driver


async def test_a_journal_with_adapters_replays(tmp_path: Path) -> None:
    driver = record(tmp_path)
    assert driver.shard.adapters.num_read.total() > 8, "no adapter was evicted"
    shard = new_shard(max_adapters=2)
    (outcome,) = await replayed(tmp_path, shard)
    assert outcome.difference is None
    assert outcome.is_compared
    assert outcome.num_tokens > 100
    assert shard.adapters.num_read == driver.shard.adapters.num_read


async def test_another_epoch_begins_with_the_loads_of_its_own(tmp_path: Path) -> None:
    record(tmp_path, fails=True)
    first, second = await replayed(tmp_path, new_shard(max_adapters=2))
    assert first.difference is None
    assert second.difference is None
    assert second.num_tokens > 20


def test_a_journal_has_digests_and_no_names(tmp_path: Path) -> None:
    record(tmp_path)
    found = [event for _, event in read_events(tmp_path) if isinstance(event, AdapterChanged)]
    digests = {event.digest for event in found if event.digest is not None}
    assert len(digests) == 5
    assert all(len(digest) == 64 for digest in digests)
    assert any(event.digest is None for event in found), "no slot was freed"


def test_the_header_has_modules_and_pages() -> None:
    head = header(new_shard(max_adapters=2))
    assert head.capacity.adapter_pages == 3
    assert head.shard.adapter_modules
    assert header_from_json(header_to_json(head)) == head
