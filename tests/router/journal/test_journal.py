"""A journal records the whole schedule in order, in spite of disk errors, and without tokens it reveals no text."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from struct import pack as pack_struct
from threading import Event as Flag
from typing import Any

import pytest
from structlog.testing import capture_logs

from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Sampling
from millrace_router.journal import journal as journal_module
from millrace_router.journal import writer as writer_module
from millrace_router.journal.frames import Kind, read_frames, split
from millrace_router.journal.journal import Journal
from millrace_router.journal.reader import Answered, Epoch, Failed, Sent, read_epochs, read_events
from millrace_router.journal.rotation import JournalFolder, journal_files
from millrace_router.journal.writer import JournalWriter
from millrace_router.request.request import Grammar, GrammarKind, ValidRequest
from millrace_router.telemetry.instruments import Counter
from millrace_testing.router.journals import (
    BUDGETS,
    RecordedDriver,
    header,
    journal_in,
    new_shard,
    replayed,
    requests,
)
from millrace_testing.shards.hash_shard import HashShard


def run(journal: Journal, shard: HashShard, *, count: int = 12, seed: int = 0) -> RecordedDriver:
    """The events of some requests that arrive one by one."""
    driver = RecordedDriver(BUDGETS, shard, journal)
    for request in requests(count, seed=seed):
        driver.submit(request)
        driver.turn()
        driver.turn()
    driver.run()
    driver.check_idle()
    return driver


def told(path: Path) -> list[tuple[Epoch, list[Any]]]:
    """Each epoch and its recorded events."""
    return [(epoch, list(epoch.events)) for epoch in read_epochs(path)]


def test_every_message_and_answer_is_there_in_order(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, dropped = journal_in(tmp_path, header(shard))
    driver = run(journal, shard)
    writer.close()
    ((epoch, events),) = told(tmp_path)
    sent = [event.message for event in events if isinstance(event, Sent)]
    assert [m.SerializeToString() for m in sent] == [m.SerializeToString() for m in shard.steps]
    answers = [event.answer for event in events if isinstance(event, Answered)]
    assert [answer.number for answer in answers] == list(range(len(sent)))
    heard = sum(len(client.tokens) for client in driver.clients.values())
    assert sum(len(answer.ids) for answer in answers) >= heard > 0
    times = [event.time_ns for event in events]
    assert times == sorted(times)
    assert epoch.header.shard.block_size == shard.block_size
    assert (dropped.value, dropped.touched) == (0, True)


def test_failures_end_epochs_and_say_what_was_in_flight(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, _ = journal_in(tmp_path, header(shard))
    driver = RecordedDriver(BUDGETS, shard, journal)
    for request in requests(6):
        driver.submit(request)
    for _ in range(5):
        driver.turn()
    shard.fail_next = "the device caught fire"
    driver.run()
    writer.close()
    first, second = told(tmp_path)
    failed = first[1][-1]
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.reason) == ("failed", "the device caught fire")
    answered = max(e.answer.number for e in first[1] if isinstance(e, Answered))
    assert failed.unanswered[0] == answered + 1
    assert second[0].index == 2
    assert isinstance(second[1][0], Sent)
    assert second[1][0].message.HasField("open")


def run_epochs(
    journal: Journal, shard: HashShard, count: int, *, num_requests: int = 12
) -> RecordedDriver:
    """Requests whose shard fails now and then, so that there are `count` epochs."""
    driver = RecordedDriver(BUDGETS, shard, journal)
    for number in range(count):
        if number:
            shard.fail_next = "again"
        for request in requests(num_requests, seed=number):
            driver.submit(request)
            driver.turn()
        driver.run()
    driver.check_idle()
    return driver


async def test_each_file_begins_with_an_epoch_and_can_be_replayed_alone(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, dropped = journal_in(tmp_path, header(shard), max_bytes=1 << 15)
    run_epochs(journal, shard, 24)
    writer.close()
    files = journal_files(tmp_path)
    assert len(files) > 3
    assert sum(path.stat().st_size for path in files) <= 1 << 15
    assert dropped.value == 0
    outcomes = [outcome for path in files for outcome in await replayed(path, new_shard())]
    assert all(outcome.difference is None for outcome in outcomes)
    assert sum(outcome.num_tokens for outcome in outcomes) > 150
    # The files join to one record, of whole epochs.
    together = await replayed(tmp_path, new_shard())
    assert [each.num_tokens for each in together] == [each.num_tokens for each in outcomes]


def test_an_epoch_stays_in_one_file(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, _ = journal_in(tmp_path, header(shard), max_bytes=1 << 16)
    run(journal, shard, count=40)
    writer.close()
    (file,) = journal_files(tmp_path)
    assert file.stat().st_size > 1 << 13, (
        "more than the size after which the next epoch has a new file"
    )
    ((_, events),) = told(tmp_path)
    sent = [event.message for event in events if isinstance(event, Sent)]
    assert [m.SerializeToString() for m in sent] == [m.SerializeToString() for m in shard.steps]


async def test_an_epoch_that_is_too_long_is_recorded_up_to_the_limit(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, dropped = journal_in(tmp_path, header(shard), max_bytes=1 << 14)
    with capture_logs() as lines:
        driver = run(journal, shard, count=80)
    assert sum("too long for the journal" in str(line) for line in lines) == 1
    assert dropped.value > 0
    (file,) = journal_files(tmp_path)
    assert 1 << 13 <= file.stat().st_size < (1 << 13) + 1000
    shard.fail_next = "again"
    for request in requests(3):
        driver.submit(request)
    driver.run()
    writer.close()
    first, *_, last = await replayed(tmp_path, new_shard())
    assert first.difference is None
    assert first.num_tokens > 20
    assert last.difference is None
    assert last.failure is None
    assert gaps(tmp_path) == [dropped.value]


def test_the_oldest_epochs_make_room_for_a_long_one(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, _ = journal_in(tmp_path, header(shard), max_bytes=1 << 15)
    driver = run_epochs(journal, shard, 20)
    before = journal_files(tmp_path)
    shard.fail_next = "again"
    for request in requests(40):
        driver.submit(request)
        driver.turn()
        driver.turn()
        assert sum(path.stat().st_size for path in journal_files(tmp_path)) <= 1 << 15
    driver.run()
    writer.close()
    after = journal_files(tmp_path)
    assert before[0] not in after
    assert before[-1] in after


def gaps(path: Path) -> list[int]:
    """The numbers of dropped records that the files of a journal have."""
    found = []
    for file in journal_files(path):
        with file.open("rb") as stream:
            records = [record for frame in read_frames(stream) for record in split(frame)]
        found += [json.loads(each.payload) for each in records if each.kind == Kind.GAP]
    return [each["dropped_records"] for each in found]


async def test_a_slow_disk_costs_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "MAX_WAITING", 10)
    shard = new_shard()
    journal, writer, dropped = journal_in(tmp_path, header(shard))
    driver = RecordedDriver(BUDGETS, shard, journal)
    for request in requests(30):
        driver.submit(request)
    for _ in range(12):
        driver.turn()
    writer.stuck = True
    with capture_logs() as lines:
        for _ in range(12):
            driver.turn()
    assert sum("cannot keep up" in str(line) for line in lines) == 1
    assert len(writer.inbox) == 10
    assert dropped.value > 0
    writer.stuck = False
    writer.wake()
    driver.turn()
    assert len(journal_files(tmp_path)) == 1, "the epoch has a gap"
    shard.fail_next = "again"
    driver.run()
    driver.check_idle()
    writer.close()
    assert len(told(tmp_path)) == 2
    assert gaps(tmp_path) == [dropped.value]
    for outcome in await replayed(tmp_path, new_shard()):
        assert outcome.difference is None
        assert outcome.num_tokens > 10


async def test_a_full_disk_costs_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = new_shard()
    journal, writer, dropped = journal_in(tmp_path, header(shard))
    driver = RecordedDriver(BUDGETS, shard, journal)
    for request in requests(30):
        driver.submit(request)
    for _ in range(12):
        driver.turn()
    write_all = writer_module.write_all

    def full(file: int, data: bytes) -> None:
        os.write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "write_all", full)
    with capture_logs() as lines:
        for _ in range(12):
            driver.turn()
    assert sum("cannot be written" in str(line) for line in lines) == 1
    assert dropped.value > 0
    monkeypatch.setattr(writer_module, "write_all", write_all)
    driver.turn()
    assert len(journal_files(tmp_path)) == 1, "the epoch has a gap"
    shard.fail_next = "again"
    driver.run()
    writer.close()
    assert len(told(tmp_path)) == 2
    assert gaps(tmp_path) == [dropped.value]
    for outcome in await replayed(tmp_path, new_shard()):
        assert outcome.difference is None
        assert outcome.num_tokens > 10


def secret_run(folder: Path, *, keeps_tokens: bool) -> bytes:
    """The decompressed journal of a run with known prompts, answers, biases and grammars."""
    shard = new_shard()
    journal, writer, _ = journal_in(
        folder, header(shard, keeps_tokens=keeps_tokens), max_bytes=1 << 16
    )
    driver = RecordedDriver(BUDGETS, shard, journal)
    sampling = Sampling(bias=((41, 2.0), (42, 3.0), (43, 4.0)), seed=5, do_sample=True)
    for number in range(30):
        driver.submit(
            ValidRequest(
                input_ids=PROMPT,
                max_new_tokens=12,
                sampling=sampling,
                prefill_logprobs=True,
                prompt_top_n_tokens=1,
                grammar=Grammar(GrammarKind.REGEX, "secret|hidden") if number % 2 else None,
            )
        )
    driver.run()
    assert all(client.tokens for client in driver.clients.values())
    writer.close()
    raw = b""
    for path in journal_files(folder):
        with path.open("rb") as stream:
            raw += b"".join(read_frames(stream))
    return raw


PROMPT = (81, 82, 83, 84, 85, 86, 87)


def test_without_tokens_nothing_of_the_text_is_written(tmp_path: Path) -> None:
    whole = secret_run(tmp_path / "whole", keeps_tokens=True)
    kept = secret_run(tmp_path / "kept", keeps_tokens=False)
    for secret in (bytes(PROMPT), bytes((41, 42, 43)), b"secret|hidden", pack_struct("<f", -0.5)):
        assert secret in whole, "the test would not see it"
        assert secret not in kept
    num_tokens = 0
    for record in split(kept):
        if record.kind == Kind.REQUEST:
            message = pb.StepRequest.FromString(record.payload)
            for sequence in message.prefill.change.admitted:
                assert set(sequence.input_ids) == {0}
                num_tokens += len(sequence.input_ids)
        elif record.kind == Kind.ANSWER:
            answer = pb.StepResponse.FromString(record.payload)
            fields = {field.name for field, _ in answer.ListFields()}
            assert fields.isdisjoint({"ids", "logprobs", "prefill_logprobs", "checksum"})
            assert fields.isdisjoint({"prefill_top_ids", "prefill_top_logprobs"})
    assert num_tokens >= 30 * len(PROMPT), "the number of dropped tokens is reported"


def test_hashes_of_prompts_tell_equal_ones_within_one_life_alone(tmp_path: Path) -> None:
    hashes = []
    for name in ("a", "b"):
        notes = [
            record.payload
            for record in split(secret_run(tmp_path / name, keeps_tokens=False))
            if record.kind == Kind.PROMPT
        ]
        hashes.append({note.split(b'"input_hash": "')[1][:16] for note in notes})
    assert [len(found) for found in hashes] == [1, 1]
    assert hashes[0] != hashes[1]


def test_a_defect_ends_the_journal_alone(tmp_path: Path) -> None:
    journal, writer, _ = journal_in(tmp_path, header(new_shard()))
    journal.sent(pb.StepRequest(epoch=3, open=pb.Open()))
    with capture_logs() as lines:
        journal.answered([pb.StepResponse(epoch=4)])
        journal.sent(pb.StepRequest(epoch=3, number=1))
    assert sum("has a defect" in str(line) for line in lines) == 1
    writer.close()
    (event,) = (event for _, event in read_events(tmp_path))
    assert isinstance(event, Sent)


async def test_the_thread_writes_all_before_it_ends(tmp_path: Path) -> None:
    shard = new_shard()
    writer = JournalWriter(JournalFolder(tmp_path, max_bytes=1 << 20), header(shard))
    journal = Journal(writer, Counter())
    run(journal, shard)
    await journal.close()
    (outcome,) = await replayed(tmp_path, new_shard())
    assert outcome.difference is None
    assert outcome.num_steps == len(shard.steps) - 1
    JournalFolder(tmp_path, max_bytes=1 << 20).close()


async def test_a_hanging_disk_blocks_no_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(writer_module, "CLOSE_SECONDS", 0.1)
    hanging, write_all = Flag(), writer_module.write_all

    def hang(file: int, data: bytes) -> None:
        assert hanging.wait(30)
        write_all(file, data)

    monkeypatch.setattr(writer_module, "write_all", hang)
    shard = new_shard()
    writer = JournalWriter(JournalFolder(tmp_path, max_bytes=1 << 20), header(shard))
    journal = Journal(writer, Counter())
    run(journal, shard)
    with capture_logs() as lines:
        await journal.close()
    assert any("end of the journal" in str(line) for line in lines)
    hanging.set()
    writer._thread.join(30)
    assert not writer._thread.is_alive()


def test_acknowledgements_of_other_ranks_stand_with_their_answer(tmp_path: Path) -> None:
    journal, writer, _ = journal_in(tmp_path, header(new_shard()))
    journal.sent(pb.StepRequest(epoch=3, open=pb.Open()))
    journal.answered([pb.StepResponse(epoch=3, checksum=rank) for rank in range(3)])
    writer.close()
    _, answered = (event for _, event in read_events(tmp_path))
    assert isinstance(answered, Answered)
    assert [each.checksum for each in (answered.answer, *answered.acknowledgements)] == [0, 1, 2]
