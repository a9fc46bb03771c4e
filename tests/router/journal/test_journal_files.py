"""Journal files: frames, records, incomplete ends, damage, names, modes and rotation."""

from __future__ import annotations

import io
import os
import stat
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace_proto import generate_pb2 as pb
from millrace_router.journal import rotation as folder_module
from millrace_router.journal.errors import JournalDamaged, JournalError, JournalUnusable
from millrace_router.journal.frames import (
    HEAD_SIZE,
    MAGIC,
    Kind,
    Record,
    frame,
    pack,
    read_frames,
    split,
)
from millrace_router.journal.header import header_from_json, header_to_json
from millrace_router.journal.reader import Event, Sent, read_epochs, read_events
from millrace_router.journal.redaction import Redaction
from millrace_router.journal.rotation import JournalFolder, journal_files
from millrace_testing.router.journals import (
    BUDGETS,
    RecordedDriver,
    header,
    journal_in,
    new_shard,
    requests,
)

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
    assert request.SerializeToString() == message.SerializeToString()
    reply = pb.StepResponse.FromString(redaction.answer(answer))
    told = {field.name for field, _ in reply.ListFields()}
    kept_fields = {"epoch", "number", "slots", "counts", "top_counts", "failed_slots"}
    kept_fields |= {"prefill_top_counts"}
    assert told <= kept_fields | {"computed_slots", "computed_positions"}
    for name in told:
        assert getattr(reply, name) == getattr(answer, name)


def _admitted(message: pb.StepRequest) -> list[pb.Sequence]:
    return [*message.prefill.change.admitted, *message.decode.change.admitted]


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


def test_a_frame_inflates_to_no_more_than_it_says() -> None:
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


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
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
