"""A journal records the whole schedule in order, in spite of disk errors, and without tokens it reveals no text."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zlib
from pathlib import Path
from struct import pack as pack_struct
from threading import Event as Flag
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from millrace_proto import generate_pb2 as pb
from millrace_proto.sampling import Sampling
from millrace_router.journal import journal as journal_module
from millrace_router.journal import rotation as folder_module
from millrace_router.journal import writer as writer_module
from millrace_router.journal.frames import (
    HEAD_SIZE,
    MAGIC,
    JournalDamaged,
    JournalError,
    JournalUnusable,
    Kind,
    Record,
    frame,
    pack,
    read_frames,
    split,
)
from millrace_router.journal.header import header_from_json, header_to_json
from millrace_router.journal.journal import Journal
from millrace_router.journal.reader import (
    Answered,
    Epoch,
    Event,
    Failed,
    Sent,
    read_epochs,
    read_events,
)
from millrace_router.journal.redaction import Redaction
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


def test_failures_end_epochs_and_name_the_steps_in_flight(tmp_path: Path) -> None:
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


async def test_each_file_begins_with_an_epoch_and_replays_by_itself(tmp_path: Path) -> None:
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
    events = []
    for file in journal_files(path):
        with file.open("rb") as stream:
            records = [record for frame in read_frames(stream) for record in split(frame)]
        events += [json.loads(each.payload) for each in records if each.kind == Kind.GAP]
    return [each["dropped_records"] for each in events]


async def test_a_slow_disk_loses_only_records(
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


async def test_a_full_disk_loses_only_records(
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


def test_hashes_of_prompts_match_only_within_one_process(tmp_path: Path) -> None:
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


def test_a_defect_ends_only_the_journal(tmp_path: Path) -> None:
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


u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
floats = st.floats(width=32)
columns = st.lists(u32, max_size=5)

sequences = st.builds(
    pb.Sequence,
    slot=u32,
    request_id=u64,
    input_ids=columns,
    generated_tokens=u32,
    cached_tokens=u32,
    parameters=st.none()
    | st.builds(
        pb.NextTokenChooserParameters,
        temperature=floats,
        seed=u64,
        watermark=st.booleans(),
        bias_ids=columns,
        bias_values=st.lists(floats, max_size=5),
    ),
    prefill_logprobs=st.booleans(),
    grammar=st.none() | st.builds(pb.Grammar, kind=st.integers(0, 3), source=st.text(max_size=9)),
)
changes = st.builds(
    pb.BatchChange,
    dropped_slots=columns,
    admitted=st.lists(sequences, max_size=3),
    grown_slots=columns,
    grown_blocks=columns,
    sealed_blocks=columns,
    sealed_keys=st.lists(st.binary(min_size=32, max_size=32), max_size=3),
)
works = st.one_of(
    st.builds(pb.Open).map(lambda work: {"open": work}),
    st.builds(pb.FilterBatch, dropped_slots=columns).map(lambda work: {"filter_batch": work}),
    st.builds(
        pb.Prefill,
        change=changes,
        chunk_slots=columns,
        chunk_tokens=columns,
        decode_slots=columns,
        decode_tokens=columns,
        draft_tokens=columns,
    ).map(lambda work: {"prefill": work}),
    st.builds(pb.Decode, change=changes, decode_slots=columns, draft_tokens=columns).map(
        lambda work: {"decode": work}
    ),
)
messages = st.builds(
    lambda epoch, number, work: pb.StepRequest(epoch=epoch, number=number, **work), u64, u64, works
)
answers = st.builds(
    pb.StepResponse,
    epoch=u64,
    number=u64,
    slots=columns,
    counts=columns,
    ids=columns,
    logprobs=st.lists(floats, max_size=5),
    top_counts=columns,
    top_ids=columns,
    top_logprobs=st.lists(floats, max_size=5),
    prefill_logprobs=st.lists(floats, max_size=5),
    prefill_top_counts=columns,
    prefill_top_ids=columns,
    prefill_top_logprobs=st.lists(floats, max_size=5),
    failed_slots=columns,
    failure_reasons=st.lists(st.text(), max_size=5),
    checksum=u64,
    computed_slots=columns,
    computed_positions=columns,
)


@given(
    st.lists(
        st.lists(
            st.builds(Record, kind=st.sampled_from(Kind), time_ns=u64, payload=st.binary()),
            min_size=1,
        )
    )
)
def test_records_come_back_as_they_were(frames: list[list[Record]]) -> None:
    data = MAGIC + b"".join(
        frame(b"".join(pack(Kind(r.kind), r.time_ns, r.payload) for r in records))
        for records in frames
    )
    read = [list(split(records)) for records in read_frames(io.BytesIO(data))]
    assert read == frames


@given(message=messages, answer=answers)
def test_messages_come_back_to_the_bit(message: pb.StepRequest, answer: pb.StepResponse) -> None:
    redaction = Redaction(keeps_tokens=True)
    assert list(redaction.notes(message)) == []
    request, reply = redaction.request(message), redaction.answer(answer)
    assert pb.StepRequest.FromString(request).SerializeToString() == message.SerializeToString()
    assert pb.StepResponse.FromString(reply).SerializeToString() == answer.SerializeToString()


@given(message=messages, answer=answers)
def test_without_tokens_the_rest_comes_back(
    message: pb.StepRequest, answer: pb.StepResponse
) -> None:
    redaction = Redaction(keeps_tokens=False)
    request = pb.StepRequest.FromString(redaction.request(message))
    for kept, sent in zip(_admitted(request), _admitted(message), strict=True):
        assert list(kept.input_ids) == [0] * len(sent.input_ids)
        assert list(kept.parameters.bias_ids) == [0] * len(sent.parameters.bias_ids)
        assert kept.grammar.source == ""
        assert kept.HasField("grammar") == sent.HasField("grammar")
        for each in (kept, sent):
            del each.input_ids[:], each.parameters.bias_ids[:]
            each.ClearField("grammar")
    for changed, sent_change in zip(_changes(request), _changes(message), strict=True):
        assert list(changed.sealed_keys) == [bytes(32)] * len(sent_change.sealed_keys)
        del changed.sealed_keys[:], sent_change.sealed_keys[:]
    assert request.SerializeToString() == message.SerializeToString()
    reply = pb.StepResponse.FromString(redaction.answer(answer))
    names = {field.name for field, _ in reply.ListFields()}
    kept_fields = {"epoch", "number", "slots", "counts", "top_counts", "failed_slots"}
    kept_fields |= {"prefill_top_counts"}
    assert names <= kept_fields | {"computed_slots", "computed_positions"}
    for name in names:
        assert getattr(reply, name) == getattr(answer, name)


def _admitted(message: pb.StepRequest) -> list[pb.Sequence]:
    return [sequence for change in _changes(message) for sequence in change.admitted]


def _changes(message: pb.StepRequest) -> list[pb.BatchChange]:
    return [message.prefill.change, message.decode.change]


def a_file(folder: Path, *, num_requests: int = 3) -> Path:
    """The only file of a journal."""
    shard = new_shard()
    journal, writer, _ = journal_in(folder, header(shard))
    driver = RecordedDriver(BUDGETS, shard, journal)
    for request in requests(num_requests):
        driver.submit(request)
    driver.run()
    writer.close()
    (file,) = journal_files(folder)
    return file


def events_of(path: Path) -> list[Event]:
    return [event for _, event in read_events(path)]


def test_a_torn_end_is_passed_over_wherever_it_is(tmp_path: Path) -> None:
    data = a_file(tmp_path / "whole").read_bytes()
    whole = events_of(tmp_path / "whole")
    torn = tmp_path / f"torn{folder_module.SUFFIX}"
    numbers = set()
    for size in range(len(data)):
        torn.write_bytes(data[:size])
        events = events_of(torn)
        assert events == whole[: len(events)]
        numbers.add(len(events))
        if size % 50 == 0:
            torn.write_bytes(data[:size] + bytes(300))
            assert events_of(torn) == events
    assert numbers >= set(range(len(whole) - 1)), "what was written before the tear is there"


def test_damage_before_the_end_is_an_error(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    data = bytearray(file.read_bytes())
    for position in range(len(MAGIC), len(data) * 2 // 3, 7):
        data[position] ^= 0x10
        file.write_bytes(data)
        with pytest.raises(JournalDamaged, match=file.name):
            events_of(file)
        data[position] ^= 0x10


def test_a_sealed_frame_of_nonsense_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    good = pack(Kind.HEADER, 0, header_to_json(header(new_shard())))
    for nonsense in (
        b"\x03",
        pack(Kind.REQUEST, 0, b"\xff\xff")[:-1],
        pack(Kind.REQUEST, 0, b"\xff"),
    ):
        path.write_bytes(MAGIC + frame(good + nonsense))
        with pytest.raises(JournalDamaged):
            events_of(path)
    path.write_bytes(MAGIC + frame(pack(Kind.END, 0, b"")))
    with pytest.raises(JournalDamaged, match="without a header"):
        events_of(path)


def test_a_frame_inflates_to_at_most_its_stated_size() -> None:
    body = zlib.compress(bytes(1 << 20))
    sealed = bytearray(frame(bytes(1 << 20)))
    # A wrong decompressed size with a matching checksum.
    sealed[12:16] = (1000).to_bytes(4, "little")
    sealed[16:20] = zlib.crc32(body, zlib.crc32(sealed[8:16])).to_bytes(4, "little")
    assert sealed[HEAD_SIZE:][:8] == frame(bytes(1 << 20))[HEAD_SIZE:][:8]
    sealed[16:20] = zlib.crc32(sealed[HEAD_SIZE:], zlib.crc32(sealed[8:16])).to_bytes(4, "little")
    with pytest.raises(JournalDamaged, match="declared size"):
        list(read_frames(io.BytesIO(MAGIC + sealed)))


def test_unknown_record_kinds_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    unknown = bytearray(pack(Kind.END, 0, b"something"))
    unknown[0] = 200
    head = pack(Kind.HEADER, 0, header_to_json(header(new_shard())))
    opening = pb.StepRequest(epoch=5, open=pb.Open()).SerializeToString()
    path.write_bytes(MAGIC + frame(head + unknown + pack(Kind.REQUEST, 7, opening)))
    (event,) = events_of(path)
    assert isinstance(event, Sent)
    assert (event.time_ns, event.message.epoch) == (7, 5)


def test_files_that_are_not_journals_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalUnusable, match="does not exist"):
        list(read_epochs(tmp_path / "nothing"))
    with pytest.raises(JournalUnusable, match="contains no journal"):
        list(read_epochs(tmp_path))
    other = tmp_path / "other.journal"
    other.write_text("{}")
    with pytest.raises(JournalUnusable, match=r"other\.journal: is not a journal"):
        list(read_epochs(tmp_path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header_to_json(header(new_shard())).replace(b'"format":1', b'"format":2'), "format 2"),
        (header_to_json(header(new_shard())).replace(b'"vocab_size":97', b'"x":1'), "vocab_size"),
        (b"[]", "another version"),
    ],
    ids=["newer", "lacking", "no-object"],
)
def test_headers_of_other_versions_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(JournalUnusable, match=message):
        header_from_json(data)


def test_headers_come_back() -> None:
    whole = header(new_shard(max_draft_tokens=3))
    assert header_from_json(header_to_json(whole)) == whole


def test_only_their_user_reads_journals(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = a_file(tmp_path / "deep" / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_two_routers_do_not_share_a_folder(tmp_path: Path) -> None:
    first = JournalFolder(tmp_path, max_bytes=1 << 20)
    with pytest.raises(JournalError, match="another router"):
        JournalFolder(tmp_path, max_bytes=1 << 20)
    first.close()
    JournalFolder(tmp_path, max_bytes=1 << 20).close()


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot keep a journal"):
        JournalFolder(tmp_path / "file", max_bytes=1 << 20)


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    folder = JournalFolder(tmp_path, max_bytes=8000)
    (tmp_path / "notes.txt").write_bytes(bytes(9000))
    names = []
    for _ in range(12):
        file = folder.begin()
        os.write(file, bytes(1000))
        os.close(file)
        files = journal_files(tmp_path)
        names.append(files[-1].name)
        assert sum(path.stat().st_size for path in files) <= 8000
    assert [path.name for path in journal_files(tmp_path)] == names[-8:]
    assert (tmp_path / "notes.txt").exists()
    folder.close()
    smaller = JournalFolder(tmp_path, max_bytes=4000)
    os.close(smaller.begin())
    assert [path.name for path in journal_files(tmp_path)][:-1] == names[-3:]
    smaller.close()


def test_files_are_few_however_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MAX_FILES", 5)
    folder = JournalFolder(tmp_path, max_bytes=1 << 20)
    for _ in range(9):
        os.close(folder.begin())
    assert len(journal_files(tmp_path)) == 5
    folder.close()


def test_without_tokens_no_embedding_is_kept() -> None:
    answer = pb.StepResponse(number=3, pooled_slots=[1], pooled_counts=[2], pooled_values=[0.5, 2])
    kept = pb.StepResponse.FromString(Redaction(keeps_tokens=False).answer(answer))
    assert kept == pb.StepResponse(number=3)


FORMAT_1 = Path(__file__).parent / "data" / "format_1"
"""Two files: 24 requests of `journals.requests` to a hash shard with up to 3 draft tokens for each row and step."""


async def test_a_journal_with_batch_ids_replays() -> None:
    sent = [event.message for _, event in read_events(FORMAT_1) if isinstance(event, Sent)]
    decodes = [message.decode for message in sent if message.HasField("decode")]
    assert any(decode.draft_tokens for decode in decodes)
    # `batch_id` was field 1.
    assert all(UnknownFieldSet(decode)[0].field_number == 1 for decode in decodes)
    (outcome,) = await replayed(FORMAT_1, new_shard(max_draft_tokens=3))
    assert outcome.difference is None
    assert outcome.is_compared
    assert outcome.num_steps == len(sent) - 1
    assert outcome.num_tokens > 150


def test_the_header_is_written_as_it_was() -> None:
    for file in journal_files(FORMAT_1):
        with file.open("rb") as stream:
            header = next(split(next(read_frames(stream)))).payload
        assert header_to_json(header_from_json(header)) == header


async def test_an_epoch_without_its_beginning_is_skipped() -> None:
    first, second = journal_files(FORMAT_1)
    assert list(read_epochs(second)) == []
    (alone,) = await replayed(first, new_shard(max_draft_tokens=3))
    assert alone.difference is None
    assert alone.num_tokens > 50
