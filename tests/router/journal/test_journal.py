"""A journal records the whole schedule in order, in spite of disk errors, and without tokens it reveals no text."""

from __future__ import annotations
import errno
import os
from pathlib import Path
from struct import pack as pack_struct
from threading import Event as Flag
from typing import Any
import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Sampling
from millrace_router.journal import journal as journal_module
from millrace_router.journal import writer as writer_module
from millrace_router.journal.frames import read_frames
from millrace_router.journal.journal import Journal
from millrace_router.journal.reader import Answered
from millrace_router.journal.reader import Epoch
from millrace_router.journal.reader import Failed
from millrace_router.journal.reader import Resumed
from millrace_router.journal.reader import Sent
from millrace_router.journal.reader import read_epochs
from millrace_router.journal.reader import read_events
from millrace_router.journal.records import Kind
from millrace_router.journal.records import split
from millrace_router.journal.rotation import JournalFolder
from millrace_router.journal.rotation import journal_files
from millrace_router.journal.shard_state import ShardState
from millrace_router.journal.writer import JournalWriter
from millrace_router.request.request import Grammar
from millrace_router.request.request import GrammarKind
from millrace_router.request.request import ValidRequest
from millrace_router.telemetry.instruments import Counter
from millrace_testing.router.journals import BUDGETS
from millrace_testing.router.journals import RecordedDriver
from millrace_testing.router.journals import header
from millrace_testing.router.journals import journal_in
from millrace_testing.router.journals import new_shard
from millrace_testing.router.journals import replayed
from millrace_testing.router.journals import requests
from millrace_testing.schedules.driver import ScheduleDriver
from millrace_testing.schedules.requests import policies
from millrace_testing.schedules.requests import valid_requests
from millrace_testing.shards.hash_choices import Choices
from millrace_testing.shards.hash_choices import RandomLengths
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


class Tap:
    """Passes every step of a shard to a `ShardState`, and compares the two."""

    def __init__(self, shard: HashShard) -> None:
        self.shard = shard
        self.state = ShardState()
        self._step = shard.step

    def step(self, request: pb.StepRequest) -> pb.StepResponse:
        if request.HasField("open"):
            self.state.end_epoch()
        answer = self._step(request)
        if answer.HasField("error"):
            return answer
        self.state.sent(request)
        self.state.answered(answer)
        self.check(request.epoch, request.number)
        return answer

    def check(self, epoch: int, number: int) -> None:
        failed = {slot for slot, running in self.shard.running.items() if running.has_failed}
        assert self.state.is_restorable == (not failed)
        snapshot = self.state.snapshot()
        assert (snapshot.epoch, snapshot.number, snapshot.pending) == (epoch, number, ())
        lives = {life.sequence.slot: life for life in snapshot.sequences}
        assert lives.keys() == self.shard.running.keys()
        for slot, running in self.shard.running.items():
            if slot in failed:
                continue
            life = lives[slot]
            assert [*life.sequence.input_ids, *life.emitted] == running.ids
            assert life.computed == running.num_computed
            assert life.blocks == running.table


@settings(max_examples=40, deadline=None)
@given(data=st.data(), budgets=policies, seed=st.integers(0, 99))
def test_the_state_is_that_of_the_shard(data: st.DataObject, budgets: Any, seed: int) -> None:
    shard = HashShard(
        num_blocks=20,
        block_size=4,
        max_batch_size=budgets.num_slots,
        max_draft_tokens=budgets.max_draft_tokens,
        choices=Choices(seed),
    )
    tap = Tap(shard)
    shard.step = tap.step  # type: ignore[method-assign]
    most = budgets.max_draft_tokens
    driver = ScheduleDriver(budgets, shard, drafts=RandomLengths(seed, most) if most else None)
    for _ in range(data.draw(st.integers(1, 6))):
        driver.submit(data.draw(valid_requests(longest=24, capacity=76, eos_every=0)))
        driver.turn()
    if data.draw(st.booleans()):
        shard.corrupt.add(0)
        driver.clients[0].may_fail = True
    driver.run()
    assert tap.state.snapshot().sequences == ()


async def test_each_file_of_an_epoch_can_be_replayed_alone(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, dropped = journal_in(tmp_path, header(shard), max_bytes=1 << 15)
    run(journal, shard, count=60)
    writer.close()
    files = journal_files(tmp_path)
    assert len(files) > 3
    assert sum(path.stat().st_size for path in files) <= 1 << 15
    assert dropped.value == 0
    resumed = num_tokens = 0
    for path in files:
        (epoch,) = read_epochs(path)
        resumed += epoch.snapshot is not None and bool(epoch.snapshot.prefill.change.admitted)
        (outcome,) = await replayed(path, new_shard())
        assert outcome.difference is None
        num_tokens += outcome.num_tokens
    assert num_tokens > 150
    assert resumed >= len(files) - 1
    # The files join to one record.
    (whole,) = await replayed(tmp_path, new_shard())
    assert whole.difference is None
    assert whole.num_tokens == num_tokens


def test_files_of_an_epoch_tell_one_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JournalFolder, "_make_room", lambda _: None)
    shard = new_shard()
    journal, writer, _ = journal_in(tmp_path, header(shard), max_bytes=1 << 15)
    run(journal, shard, count=40)
    writer.close()
    assert len(journal_files(tmp_path)) > 3
    ((_, events),) = told(tmp_path)
    sent = [event.message for event in events if isinstance(event, Sent)]
    assert [m.SerializeToString() for m in sent] == [m.SerializeToString() for m in shard.steps]


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
    driver.run()
    driver.check_idle()
    writer.close()
    first, second = (epoch for epoch, _ in told(tmp_path))
    assert (first.snapshot is None, second.snapshot is None) == (True, False)
    resumed = [event for _, event in read_events(tmp_path) if isinstance(event, Resumed)]
    assert [event.num_dropped for event in resumed] == [dropped.value]
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
    assert len(journal_files(tmp_path)) == 1, "a new file is not tried at each step"
    monkeypatch.setattr(writer_module, "write_all", write_all)
    writer._retry_at = 0.0
    driver.run()
    writer.close()
    first, second = (epoch for epoch, _ in told(tmp_path))
    assert (first.snapshot is None, second.snapshot is None) == (True, False)
    resumed = [event for _, event in read_events(tmp_path) if isinstance(event, Resumed)]
    assert [event.num_dropped for event in resumed] == [dropped.value]
    for outcome in await replayed(tmp_path, new_shard()):
        assert outcome.difference is None
        assert outcome.num_tokens > 10


def test_what_failed_is_never_in_a_snapshot(tmp_path: Path) -> None:
    shard = new_shard()
    journal, writer, _ = journal_in(tmp_path, header(shard))
    driver = RecordedDriver(BUDGETS, shard, journal, depth=1)
    for request in requests(4):
        driver.submit(request)
    driver.turn()
    driver.turn()
    shard.corrupt.add(1)
    driver.clients[1].may_fail = True
    num_files = len(journal_files(tmp_path))
    while not shard.running or not any(row.has_failed for row in shard.running.values()):
        assert driver.turn()
    writer.wants_new_file = True
    driver.send()
    assert len(journal_files(tmp_path)) == num_files, "a row that failed is in its slot"
    driver.run()
    assert len(journal_files(tmp_path)) == num_files + 1


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
    assert len(journal_files(folder)) > 1, "there is a snapshot too"
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
        if record.kind in {Kind.REQUEST, Kind.SNAPSHOT}:
            message = pb.StepRequest.FromString(record.payload)
            for sequence in message.prefill.change.admitted:
                assert set(sequence.input_ids) == {0}
                num_tokens += len(sequence.input_ids)
        elif record.kind == Kind.ANSWER:
            answer = pb.StepResponse.FromString(record.payload)
            fields = {field.name for field, _ in answer.ListFields()}
            assert fields.isdisjoint({"ids", "logprobs", "prefill_logprobs", "checksum"})
            assert fields.isdisjoint({"prefill_top_ids", "prefill_top_logprobs"})
    assert num_tokens >= 30 * len(PROMPT), "their number is told"


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
